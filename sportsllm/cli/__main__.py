"""`python -m sportsllm.cli`."""

from sportsllm.cli.main import main

main()
