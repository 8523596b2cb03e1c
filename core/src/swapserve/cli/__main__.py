"""`python -m swapserve.cli` is the command `serve`."""

from swapserve.cli import main

main(prog_name="serve")
