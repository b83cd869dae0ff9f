"""``python -m ragr1_actors`` is ``ragr1``."""

from ragr1_actors.cli.main import main

if __name__ == "__main__":  # processes that ragr1 spawns import this module, too
    main()
