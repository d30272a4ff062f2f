"""A plain PyTorch implementation of arktts, written from the specification: the other engine that
this package's runtime is held against. It shares no arithmetic with it and never imports MLX.

    rope, transformer   both transformers      generate   the eager loop
    sampling            how a token is chosen  static     whole frames in one CUDA graph
    codec               waves to codes, back   load       checkpoints in the published layout
    dump                what an engine computed, in a file that `warble verify` reads
"""
