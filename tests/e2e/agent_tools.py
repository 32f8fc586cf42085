"""Work for an agent in the words that the reference model was trained on: tools with effects, and orders for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

OPENERS = ("please ", "now ", "ok, ", "hi, ")
CITIES = ("oslo", "lima", "berlin", "vienna", "paris", "warsaw", "athens", "madrid")
ITEMS = ("lamp", "kite", "bell", "apple", "cloud", "boat", "piano", "fish")
LEVELS = (13, 47, 128, 256, 391, 474, 605, 718, 829, 936)


@dataclass(slots=True)
class House:
    """What the tools read and change."""

    prices: dict[str, int]
    orders: list[tuple[str, int]] = field(default_factory=list)
    alarms: list[tuple[str, int]] = field(default_factory=list)

    def find_price(self, item: str, city: str) -> str:
        """find the price"""
        return str(self.prices[f"{item} in {city}"])

    def set_alarm(self, city: str, level: int) -> str:
        """set the alarm"""
        self.alarms.append((city, level))
        return f"cold {level}"

    def add_order(self, item: str, count: int) -> str:
        """add the order"""
        self.orders.append((item, count))
        return "ok"


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation: an order to find a price and to order that many, then one to set two alarms in one go."""

    opener: str
    item: str
    city: str
    other: str
    price: int
    level: int

    def house(self) -> House:
        return House({f"{self.item} in {self.city}": self.price})

    @property
    def find(self) -> str:
        """An order of one call, no part of the job."""
        return f"{self.opener}find the price using item {self.item}, city {self.city}."

    @property
    def first(self) -> str:
        """An order of two calls, the second with what the first gave."""
        return self.find.removesuffix(".") + f", then add the order using item {self.item}, count the result."

    @property
    def second(self) -> str:
        """An order of two calls in one turn."""
        return (
            f"{self.opener}set the alarm using city {self.city}, level {self.level}"
            f" and also set the alarm using city {self.other}, level {self.price}."
        )

    @property
    def answers(self) -> tuple[str, str]:
        """What the model says after each order."""
        return "the result is ok.", f"the result is cold {self.level}, then cold {self.price}."

    def is_done(self, house: House) -> bool:
        # Calls of one turn may run in any order.
        alarms = sorted([(self.city, self.level), (self.other, self.price)])
        return house.orders == [(self.item, self.price)] and sorted(house.alarms) == alarms


def jobs(count: int, seed: int) -> list[Job]:
    """`count` jobs, the same for the same seed."""
    rng = Random(seed)
    made = []
    for _ in range(count):
        city, other = rng.sample(CITIES, 2)
        price, level = rng.sample(LEVELS, 2)
        made.append(Job(rng.choice(OPENERS), rng.choice(ITEMS), city, other, price, level))
    return made


def schema(*names: str) -> dict[str, object]:
    """Parameters of a tool: whole numbers for counts and levels, strings otherwise."""
    kinds = {name: {"type": "integer" if name in ("count", "level") else "string"} for name in names}
    return {"type": "object", "properties": kinds, "required": list(names)}


PARAMETERS = {
    "find_price": schema("item", "city"),
    "set_alarm": schema("city", "level"),
    "add_order": schema("item", "count"),
}


def run(house: House, name: str, arguments: str | dict[str, object]) -> str:
    """What the tool `name` gives. Raises KeyError or TypeError for a call that no tool takes."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name not in PARAMETERS:
        raise KeyError(name)
    return str(getattr(house, name)(**given))
