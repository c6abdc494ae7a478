"""`python -m vitadel`, for launchers such as torchrun that start modules."""

from vitadel.cli.main import main

main()
