"""`python -m hexiseq_triton`: the command line, where `hexiseq` is not on the path."""

from hexiseq_triton.cli import app

if __name__ == "__main__":
    app(prog_name="hexiseq")
