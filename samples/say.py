"""Say a sentence with the bundled voice and write it to a file.

python samples/say.py
python samples/say.py "Another sentence." other.wav
"""

import sys

from warble_mlx import load

text = sys.argv[1] if len(sys.argv) > 1 else "The birch canoe slid across the quiet lake at dawn."
path = sys.argv[2] if len(sys.argv) > 2 else "say.wav"

warble = load()
speech = warble.say(text, seed=1)
saved = speech.save(path)
print(f"{speech.seconds:.2f} s in {speech.voice}'s voice, RTF {speech.rtf:.2f}: {saved}")
