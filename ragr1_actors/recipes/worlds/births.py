"""A register of births: sixty people in each city of the generated world, too many to learn by heart who they are."""

from __future__ import annotations

import random
from typing import NamedTuple

from envs.tasks.world import EntityKind, make_world

PER_CITY = 60


class Person(NamedTuple):
    """Entry of the register."""

    name: str
    city: str
    year: int


def register() -> dict[str, Person]:
    """Return the entries by passage id, ``{"p0": Person("Ana Bell", "Adana", 1976)}``, those of a city in a row."""
    rng, known = random.Random("births"), make_world(0).entities.values()
    people = [one for one in known if one.kind is EntityKind.PERSON]
    firsts, lasts = (sorted({one.name.split()[part] for one in people}) for part in (0, -1))
    cities = sorted({one.place_or_maker for one in people})
    places = (city for city in cities for _ in range(PER_CITY))
    drawn = (Person(f"{rng.choice(firsts)} {rng.choice(lasts)}", city, rng.randrange(1950, 2000)) for city in places)
    return {f"p{number}": one for number, one in enumerate(drawn)}
