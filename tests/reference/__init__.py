"""A plain PyTorch implementation of arktts, written from the specification: the other engine that
this package's runtime is held against. It shares no arithmetic with it and does not use MLX.

    rope, transformer   both transformers      generate   the eager loop
    sampling            how a token is chosen  static     whole frames in one CUDA graph
    codec               waves to codes, back   prompt     text to columns
    load, bundle        checkpoints in the published layout, and bundles of this package

    record, dump        what an engine computes, in a file that `warble verify` reads
    published           the same of the published remote code (published_environment: how to run it)
    small_dump          the dump that the tests keep
    benchmark           eager, partly compiled and static, timed
    cuda_ladder         MLX against this engine on one GPU; the only module that imports MLX
"""
