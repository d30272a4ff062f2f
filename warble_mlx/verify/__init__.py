"""Is this the same model? A bundle against what another engine computed from its source.

`dump` is the file format, `compare` the limits and ties, `ladder` and `codec_ladder` the rungs,
`self_check` what can be said without a dump, `report` the verdict. Importing this package, `dump`
or `compare` does not import MLX, so that other engines can write dumps.
"""
