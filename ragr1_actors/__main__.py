"""``python -m ragr1_actors`` is ``ragr1``."""

from ragr1_actors.cli.main import main

main()
