"""python -m samples.bundled_voice: see recipe.py."""

from samples.bundled_voice.recipe import main

if __name__ == "__main__":
    main()
