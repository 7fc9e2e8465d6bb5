"""The subcommands of `hexiseq`, a module each; `hexiseq_triton.cli` puts them together."""
