"""A small seeded world to search in: people, films, companies and cities, and questions about them.

It replaces Wikipedia on machines without a network or a GPU. Every entity has one passage, titled with its name::

    Ana Bell was born in Riga in the year 1931.             Silent River was filmed by Ana Bell in the year 1974.
    Novacor Mills was founded by Bo Cole in the year 1953.  Riga is a city in Latvia.

and every question but those of ``no_search`` needs passages, in one round or several:

============  ==================================================================  =====================================
category      question                                                            plan (a tuple per round)
============  ==================================================================  =====================================
one_hop       Where was Ana Bell born?                                            (Ana Bell,)
two_hop       Where was the director of Silent River born?                        (Silent River,) (Ana Bell,)
three_hop     In which country was the director of Silent River born?             (Silent River,) (Ana Bell,) (Riga,)
comparison_2  When was the first of Ana Bell or Bo Cole born?                     (Ana Bell, Bo Cole)
comparison_3  When was the first of Ana Bell or Bo Cole or Cy Dow born?           (Ana Bell, Bo Cole, Cy Dow)
no_search     Ana Bell lives in Riga. Where does Ana Bell live?                   ()
============  ==================================================================  =====================================

No training question has both the supporting passages and the answer of an evaluation question, in any wording. Both
splits ask about the same entities, as in HotpotQA.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from ragr1_actors.core.types import Task
from retrieval.base import Passage

YEARS = range(1950, 2000)
NUM_TRAIN_TASKS = 12_000
NUM_EVAL_TASKS = 300
_MAX_VAIN_DRAWS = 500
"""Draws in a row without a new question after which a category counts as used up."""
CATEGORY_SHARES = {
    "one_hop": 0.12,
    "two_hop": 0.24,
    "three_hop": 0.20,
    "comparison_2": 0.18,
    "comparison_3": 0.18,
    "no_search": 0.08,
}


def _words(text: str) -> list[str]:
    return text.split()


_FIRST_NAMES = _words(
    "Ana Bo Cy Dora Emil Fay Gil Hana Ivo Jana Karl Lena Milo Nina Otto Pia Rolf Sara Tom Uma Vera Walt Yara Zeno "
    "Alma Bruno Clara Dario Edith Felix Greta Hugo Irene Jonas Katya Leon Marta Nils Olga Pavel"
)
_LAST_NAMES = _words(
    "Bell Cole Dow Eriksen Falk Gray Holt Imre Jansen Kerr Lund Marsh Novak Ortiz Pike Quinn Rossi Stone Tate Unger "
    "Voss Wolf Yates Zorn Abel Brandt Costa Drake Ellis Frost Gomez Hardy Ibsen Klein Lopez Moss Nolan Olsen Page "
    "Reyes Salo Toth Ulrich Vance Weber Xavier Young Zeller Archer Becker"
)
_FILM_ADJECTIVES = _words(
    "Silent Golden Broken Hidden Distant Crimson Frozen Burning Empty Endless Gentle Hollow Lonely Narrow Perfect "
    "Quiet Restless Sacred Wild Stolen Tender Velvet Wicked Winter Ancient Bitter Clever Daring Electric Faded "
    "Graceful Humble Invisible Jagged Kindred Lucky Midnight Noble Painted Rusty"
)
_FILM_NOUNS = _words(
    "River Garden Mirror Harbor Letter Shadow Summer Bridge Forest Candle Island Journey Lantern Meadow Night Orchard "
    "Promise Road Secret Tower Valley Window Storm Echo Anchor Ballad Castle Desert Empire Feather Glacier Horizon "
    "Jungle Kingdom Labyrinth Mountain Needle Ocean Palace Station"
)
_COMPANY_NAMES = _words(
    "Novacor Altima Bravix Celtrix Dynaris Elvaro Fermio Galvex Helixa Intrado Jovanta Kelvaro Luminor Mantico Nexora "
    "Optimar Pentix Quantia Rivulo Solvana Tervix Ultraco Ventura Wexford Xantech Zephyra Arcadio Belmonta Corvex "
    "Delphia"
)
_COMPANY_KINDS = _words(
    "Mills Motors Foods Press Steel Glass Mining Textiles Airways Brewing Pharma Optics Paper Radio Shipping Tools "
    "Bank Cement Energy Films Games Hotels Lamps Robotics"
)
_CITIES_BY_COUNTRY = {
    "Norway": "Oslo Bergen Trondheim Stavanger Drammen",
    "Poland": "Warsaw Krakow Gdansk Poznan Lublin",
    "Japan": "Tokyo Osaka Kyoto Nagoya Sapporo",
    "Brazil": "Recife Salvador Fortaleza Manaus Curitiba",
    "Turkey": "Ankara Izmir Bursa Konya Adana",
    "Kenya": "Nairobi Mombasa Kisumu Nakuru Eldoret",
    "India": "Mumbai Delhi Chennai Pune Jaipur",
    "Italy": "Rome Milan Turin Naples Bologna",
    "Spain": "Madrid Seville Valencia Bilbao Malaga",
    "Egypt": "Cairo Luxor Aswan Giza Suez",
    "Canada": "Toronto Ottawa Calgary Halifax Regina",
    "Chile": "Santiago Arica Iquique Talca Temuco",
    "Greece": "Athens Patras Volos Larissa Corfu",
    "Latvia": "Riga Jelgava Ventspils Daugavpils Liepaja",
    "Morocco": "Rabat Fez Agadir Tangier Marrakesh",
    "Portugal": "Lisbon Porto Braga Coimbra Faro",
}


class EntityKind(StrEnum):
    """Subject of a passage of the world."""

    PERSON = "person"
    FILM = "film"
    COMPANY = "company"
    CITY = "city"


@dataclass(frozen=True, slots=True)
class Entity:
    """One subject of the world: ``Entity("p17", "Ana Bell", EntityKind.PERSON, "Riga", 1931)``."""

    passage_id: str
    name: str
    kind: EntityKind
    place_or_maker: str
    """City of a person, country of a city, director of a film or founder of a company."""
    year: int | None = None
    """Year of birth, filming or founding; None for a city."""

    def passage(self) -> Passage:
        """Return the passage about the entity."""
        name, value, year = self.name, self.place_or_maker, self.year
        text = {
            EntityKind.PERSON: f"{name} was born in {value} in the year {year}.",
            EntityKind.FILM: f"{name} was filmed by {value} in the year {year}.",
            EntityKind.COMPANY: f"{name} was founded by {value} in the year {year}.",
            EntityKind.CITY: f"{name} is a city in {value}.",
        }[self.kind]
        return Passage(self.passage_id, name, text)


@dataclass(frozen=True)
class World:
    """A corpus, and the questions that it answers."""

    seed: int
    entities: Mapping[str, Entity]
    """Entities by name."""
    passages: tuple[Passage, ...]
    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]

    def texts(self) -> Iterator[str]:
        """Yield every passage and question, with names behind a space as observations lay them out."""
        for passage in self.passages:
            yield f" {passage.title}: {passage.text}"
        for task in (*self.train_tasks, *self.eval_tasks):
            yield task.question


def make_world(seed: int, shares: Mapping[str, float] = CATEGORY_SHARES) -> World:
    """Make the world of ``seed``: same seed, same passages and tasks, on every machine.

    ``shares`` are the shares of the categories in the tasks: ``{"one_hop": 1.0}`` asks about one hop only.
    """
    return _make_world(seed, tuple(shares.items()))


@lru_cache(maxsize=4)
def _make_world(seed: int, shares: tuple[tuple[str, float], ...]) -> World:
    rng = random.Random(f"world {seed}")
    entities = {entity.name: entity for entity in _make_entities(rng)}
    draw = _QuestionDraw(entities)
    eval_tasks = _make_tasks(draw, rng, "eval", NUM_EVAL_TASKS, shares, excluded=set())
    known = {_fact(task) for task in eval_tasks}
    train_tasks = _make_tasks(draw, rng, "train", NUM_TRAIN_TASKS, shares, excluded=known)
    passages = tuple(entity.passage() for entity in entities.values())
    return World(seed, entities, passages, train_tasks, eval_tasks)


def _make_entities(rng: random.Random) -> list[Entity]:
    cities = [
        Entity(f"city{country_index}{city_index}", city, EntityKind.CITY, country)
        for country_index, (country, names) in enumerate(_CITIES_BY_COUNTRY.items())
        for city_index, city in enumerate(names.split())
    ]
    # Every pair of words is a name. There are so many that a small policy cannot learn the facts: it has to read.
    people = _make_kind(rng, EntityKind.PERSON, (_FIRST_NAMES, _LAST_NAMES), cities)
    films = _make_kind(rng, EntityKind.FILM, (_FILM_ADJECTIVES, _FILM_NOUNS), people)
    companies = _make_kind(rng, EntityKind.COMPANY, (_COMPANY_NAMES, _COMPANY_KINDS), people)
    return [*people, *films, *companies, *cities]


def _make_kind(
    rng: random.Random, kind: EntityKind, words: tuple[list[str], list[str]], values: list[Entity]
) -> list[Entity]:
    names = [f"{first} {second}" for first in words[0] for second in words[1]]
    return [
        Entity(f"{kind.value}{index}", name, kind, rng.choice(values).name, rng.choice(YEARS))
        for index, name in enumerate(names)
    ]


_Fact = tuple[frozenset[str], str, str]


def _fact(task: Task) -> _Fact:
    """Return a key of the fact that a question asks for, in any wording: passages and answer, or else its text."""
    return frozenset(task.supporting_ids), task.golden_answers[0], "" if task.supporting_ids else task.question


def _make_tasks(
    draw: _QuestionDraw,
    rng: random.Random,
    split: str,
    count: int,
    shares: Sequence[tuple[str, float]],
    excluded: set[_Fact],
) -> tuple[Task, ...]:
    """Draw ``count`` different questions about facts not in ``excluded``, the categories in their shares, shuffled.

    There are fewer tasks if a category has too few questions: about 4,600 of three hops.
    """
    tasks: dict[str, Task] = {}
    for category, share in shares:
        wanted, num_vain = len(tasks) + round(count * share), 0
        while len(tasks) < wanted and num_vain < _MAX_VAIN_DRAWS:
            task = draw(category, rng)
            is_new = task.question not in tasks and _fact(task) not in excluded
            num_vain = 0 if is_new else num_vain + 1
            if is_new:
                tasks[task.question] = task
    shuffled = list(tasks.values())
    rng.shuffle(shuffled)
    return tuple(replace(one, task_id=f"world/{split}/{index}") for index, one in enumerate(shuffled))


class _QuestionDraw:
    """Draws one question of a category."""

    def __init__(self, entities: Mapping[str, Entity]) -> None:
        self._entities = entities
        self._pools: dict[EntityKind, list[Entity]] = {}
        for entity in entities.values():
            self._pools.setdefault(entity.kind, []).append(entity)

    def __call__(self, category: str, rng: random.Random) -> Task:
        if category.startswith("comparison"):
            return self._comparison(category, int(category[-1]), rng)
        if category == "no_search":
            return self._no_search(rng)
        hops = {"one_hop": 1, "two_hop": 2, "three_hop": 3}[category]
        starts = [k for k, templates in _CHAINS.items() if hops in templates]
        kind = rng.choice(starts)
        entity = rng.choice(self._pools[kind])
        template, asks_year = rng.choice(_CHAINS[kind][hops])
        return self._chain(category, template, entity, hops, asks_year)

    def _chain(self, category: str, template: str, entity: Entity, hops: int, asks_year: bool) -> Task:
        chain = [entity]
        while len(chain) < hops:
            chain.append(self._entities[chain[-1].place_or_maker])
        answer = str(chain[-1].year) if asks_year else chain[-1].place_or_maker
        return Task(
            "",
            template.format(entity.name),
            (answer,),
            category,
            tuple(e.passage_id for e in chain),
            tuple((e.name,) for e in chain),
        )

    def _comparison(self, category: str, count: int, rng: random.Random) -> Task:
        kind = rng.choice(tuple(_COMPARISONS))
        while True:
            entities = rng.sample(self._pools[kind], count)
            years = [entity.year or 0 for entity in entities]
            words = {word for entity in entities for word in entity.name.split()}
            # one is the first, one is the last, and no two names share a word
            if years.count(min(years)) == years.count(max(years)) == 1 and len(words) == 2 * count:
                break
        names = tuple(entity.name for entity in entities)
        question = f"When was the first of {' or '.join(names)} {_COMPARISONS[kind]}?"
        return Task("", question, (str(min(years)),), category, tuple(e.passage_id for e in entities), (names,))

    def _no_search(self, rng: random.Random) -> Task:
        # no passage has the fact; only the question has it
        person = rng.choice(self._pools[EntityKind.PERSON])
        city = rng.choice(self._pools[EntityKind.CITY])
        question = f"Today {person.name} lives in {city.name}. Where does {person.name} live?"
        return Task("", question, (city.name,), "no_search")


def _questions_on_work(maker: str, first_hop: list[tuple[str, bool]]) -> dict[int, list[tuple[str, bool]]]:
    return {
        1: first_hop,
        2: [(f"Where was the {maker} of {{}} born?", False), (f"When was the {maker} of {{}} born?", True)],
        3: [
            (f"In which country was the {maker} of {{}} born?", False),
            (f"From which country is the {maker} of {{}}?", False),
        ],
    }


_CHAINS: dict[EntityKind, dict[int, list[tuple[str, bool]]]] = {
    EntityKind.PERSON: {
        1: [("Where was {} born?", False), ("When was {} born?", True)],
        2: [("In which country was {} born?", False)],
    },
    EntityKind.FILM: _questions_on_work("director", [("Who directed {}?", False), ("When was {} filmed?", True)]),
    EntityKind.COMPANY: _questions_on_work("founder", [("Who founded {}?", False), ("When was {} founded?", True)]),
}
"""Templates of questions by kind of the first entity and number of hops, and whether each asks for a year."""
_COMPARISONS = {EntityKind.PERSON: "born", EntityKind.FILM: "filmed", EntityKind.COMPANY: "founded"}
