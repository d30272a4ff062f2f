"""A local speech server with OpenAI's endpoints, and a page to try it.

    request ──► Worker: one thread, one model, rows side by side ──chunks──► Encoder ──► answer

Only the worker's thread touches MLX; NumPy arrays are all that leaves it.
"""
