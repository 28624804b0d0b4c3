"""What mixed precision costs and saves: programs that `make bench` and the project's comparisons run.

    python -m benchmarks.run                              time on a GPU, or the compiled H100 figures without one
    python -m benchmarks.numerics amp_jax.autocast        gradient error beside hand-written half precision
    python -m benchmarks.scaling                          what loss scaling adds to a float16 step
    python -m benchmarks.all_low                          the floor: every operation in the low dtype

A *step* is a whole AdamW training step of one of the models in `workloads`. A *variant* is the way it comes to a dtype:
`float32` as written, `hand` with `dtype=` set on every layer, `all-low`, or `ours`.
"""
