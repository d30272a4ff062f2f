"""Speak like a clip: here one that the bundled voice has just made.

python samples/clone.py
"""

from warble_mlx import load

SAID = "This clip is the voice to follow."

warble = load()
clip = warble.say(SAID, voice=1, seed=1).save("clip.wav")
speech = warble.say("Words that nobody has said yet.", ref_audio=clip, ref_text=SAID, seed=1)
print(f"{speech.seconds:.2f} s: {speech.save('clone.wav')}")
