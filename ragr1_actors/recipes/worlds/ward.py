"""A made-up ward: diseases of six phenotypes each, patients who have some of them, and new patients to diagnose."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property

from envs.sources import Split, TaskSource
from ragr1_actors import Passage, Task

_WORDS = """
fever rash cough chills ache nausea tremor fatigue pallor itching swelling vertigo cramps thirst
sweating hoarseness numbness blurring wheezing bruising insomnia weakness stiffness palpitations
dizziness jaundice bleeding confusion sneezing hiccups fainting drooling twitching flushing scaling
blisters cyanosis anemia ascites gout rigor apathy
"""
PHENOTYPES = tuple(_WORDS.split())
NUM_DISEASES, NUM_PATIENTS = 40, 12
"""The paper has 16,371 diseases and 177,029 patients."""


class Ward(TaskSource):
    """Made-up diseases of six phenotypes, of which each patient has four, and one more of another disease."""

    @cached_property
    def _diseases(self) -> dict[str, list[str]]:
        rng, ends = random.Random(0), ("vor", "lis", "dan", "mex", "tia")
        names = [f"{start}{end}" for start in ("Al", "Be", "Co", "Du", "Er", "Fi", "Go", "Ha") for end in ends]
        return {name: rng.sample(PHENOTYPES, 6) for name in names[:NUM_DISEASES]}

    def _patient(self, disease: str, rng: random.Random) -> list[str]:
        own = rng.sample(self._diseases[disease], 4)
        found = [*own, rng.choice([one for one in PHENOTYPES if one not in self._diseases[disease]])]
        rng.shuffle(found)
        return found

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 6,000 training tasks, or 300 others, each about a new patient."""
        rng, found = random.Random(f"ward {split}"), []
        for number in range(6000 if split == "train" else 300):
            disease = rng.choice(list(self._diseases))
            has = self._patient(disease, rng)
            question = f"A patient has {', '.join(has)}."
            found.append(Task(f"ward/{split}/{number}", question, (disease,), meta={"phenotypes": has}))
        return found

    def passages(self) -> Sequence[Passage]:
        """Return twelve patients of each disease, and what is known of the disease."""
        rng, found = random.Random("patients"), []
        for disease, has in self._diseases.items():
            found.append(Passage(f"disease/{disease}", disease, f"{disease} comes with {', '.join(has)}."))
            for number in range(NUM_PATIENTS):
                shown = ", ".join(self._patient(disease, rng))
                found.append(Passage(f"patient/{disease}{number}", disease, f"A patient with {shown} had {disease}."))
        return found

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a match of some phenotypes, perhaps a search, and an answer that is often wrong."""
        has, gold = task.meta["phenotypes"], task.golden_answers[0]
        said = gold if rng.random() < 0.5 else rng.choice(list(self._diseases))
        turns = [f"<match> {', '.join(rng.sample(has, rng.randint(1, len(has))))}</match>"] * (rng.random() < 0.7)
        turns += [f"<search> {said}</search>"] * (rng.random() < 0.3)
        return [*turns, f"<answer> {said}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the questions and passages, and the words behind a space."""
        yield from super().texts(tasks)
        yield from (f" {one.text}" for one in self.passages())
        yield from (f" {name}" for name in (*PHENOTYPES, *self._diseases))
