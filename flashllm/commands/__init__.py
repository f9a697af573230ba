"""One module a verb of the command line: `add_arguments(parser)` and `main(args) -> int`.

Nothing heavy is imported before `main` runs, so that help and wrong arguments answer at once.
"""
