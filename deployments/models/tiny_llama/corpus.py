"""The tiny target's world: seeded prompts and answers in nine categories, all of it written here.

An answer is a function of its prompt (what a baker uses, how an onion is prepared, what 34 + 58 is),
so answers to different prompts differ, greedy ones too. `held_out_and_training` splits prompts so that
no run of five words of a held-out prompt stands in any training prompt. The words are in words.txt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUN = 5  # words: no longer run is shared by held-out and training prompts


@dataclass(frozen=True)
class Example:
    category: str
    prompt: str
    answer: str


_TEXT = (Path(__file__).parent / "words.txt").read_text().strip().removeprefix("[")
SECTIONS = dict(part.split("]\n", 1) for part in _TEXT.split("\n\n["))


def words(section: str) -> list[str]:
    """Words of a section, separated by spaces."""
    return SECTIONS[section].split()


def rows(section: str) -> list[list[str]]:
    """Rows of a section, one a line, cells separated by `|`."""
    return [[cell.strip() for cell in line.split("|")] for line in SECTIONS[section].splitlines()]


NAMES = words("names")
PLACES = words("places")
COLOURS = words("colours")
DAYS = words("days")
HOBBIES = words("hobbies")
DISHES = words("dishes")
NOUNS = words("nouns")
ANIMALS = rows("animals")
OBJECTS = rows("objects")
JOBS = rows("jobs")
INGREDIENTS = rows("ingredients")
TRIPS = rows("trips")
EVENTS = rows("events")
OUTINGS = rows("outings")
CODE = rows("code")


def habit(word: str, options: list[str]) -> str:
    """The option that belongs to a word, the same one each time."""
    return options[sum(map(ord, word)) % len(options)]


def an(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def story(r: random.Random) -> tuple[str, str]:
    name, place, colour = r.choice(NAMES), r.choice(PLACES), r.choice(COLOURS)
    animal, trait, home, food, skill = r.choice(ANIMALS)
    thing, found, did, love = r.choice(OBJECTS)
    prompt = r.choice([
        f"Tell me about {name} the {animal} and the {colour} {thing} of {place}.",
        f"A story, please: {animal} {name}, {colour} {thing}, {place}.",
        f"What did {animal} {name} do in {place} with {an(colour)} {colour} {thing}?",
    ])
    return prompt, (
        f"{name} was a {trait} {animal} who lived in {home} near {place}. Nobody else could {skill}. "
        f"One {habit(thing, ['morning', 'evening', 'night'])}, while {name} looked for {food}, {an(colour)} {colour} "
        f'{thing} {found}. "{love.capitalize()} at last!" cried the {animal}. The {thing} {did}, and {name} shared '
        f"{food} with all of {place}. "
        f"Since then every {animal} there dreams of {love}."
    )


def checklist(r: random.Random) -> tuple[str, str]:
    name, day, place = r.choice(NAMES), r.choice(DAYS), r.choice(PLACES)
    trip, *items = r.choice(TRIPS)
    count = r.choice([3, 4, 5])
    number = {3: "three", 4: "four", 5: "five"}[count]
    first = DAYS.index(day) % len(items)
    chosen = (items[first:] + items[:first])[:count]
    prompt = r.choice([
        f"{name} plans a {trip} near {place} on {day}. Name {number} things to take.",
        f"List {number} things for the {trip} of {name} ({place}, {day}).",
        f"Which {number} things does {name} need for {day}'s {trip} in {place}?",
    ])
    lines = "\n".join(f"{i}. {item.capitalize()}" for i, item in enumerate(chosen, 1))
    return prompt, (
        f"For the {trip} near {place}, {name} should take {number} things:\n{lines}\n"
        f"Pack them before {day} and enjoy {place}!"
    )


def sums(r: random.Random) -> tuple[str, str]:
    name, noun = r.choice(NAMES), r.choice(["apples", "stamps", "shells", "beads", "plums", "cards", "pears", "bricks"])
    a, b = r.randint(12, 89), r.randint(12, 89)
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    prompt = r.choice([
        f"{name} has {a} {noun} and gets {b} more. How many now?",
        f"Add {a} and {b} {noun} for {name}, step by step.",
        f"{a} {noun} plus {b} {noun}: what does {name} hold?",
    ])
    return prompt, (
        f"{name} starts with {a} {noun} and adds {b}.\nTens: {a // 10 * 10} + {b // 10 * 10} = {tens}.\n"
        f"Ones: {a % 10} + {b % 10} = {ones}.\nTogether: {tens} + {ones} = {a + b}.\nSo {name} has {a + b} {noun}."
    )


def record(r: random.Random) -> tuple[str, str]:
    name, place, age = r.choice(NAMES), r.choice(PLACES), r.randint(18, 79)
    job = r.choice(JOBS)
    likes = r.sample(HOBBIES, 2)
    prompt = r.choice([
        f"Write JSON: {name}, {age}, {job[0]} in {place}, likes {likes[0]} and {likes[1]}.",
        f"{name} ({age}) is a {job[0]} from {place} who enjoys {likes[0]} and {likes[1]}. As JSON?",
    ])
    body = {"name": name, "age": age, "job": job[0], "city": place, "tools": job[1].replace(" and ", ", ").split(", "),
            "likes": likes, "works": job[2], "senior": age >= 60}
    return prompt, json.dumps(body, indent=1)


def code(r: random.Random) -> tuple[str, str]:
    many, name = r.choice(NOUNS), r.choice(NAMES)
    verb, result, start, step, value = r.choice(CODE)
    one = many[:-2] if many.endswith("xes") else many[:-1]
    prompt = r.choice([
        f"{name} needs Python that {verb} {many}.",
        f"Code for {name}: a function that {verb} {many}, please.",
        f"Python, {many}: what {verb} them for {name}?",
    ])
    fill = {"one": one, "many": many}
    return prompt, (
        f"Here is a function for {name}:\n\ndef {result}_of_{many}({many}):\n    {result} = {start.format(**fill)}\n"
        f"    for {one} in {many}:\n        {step.format(**fill)}\n    return {value.format(**fill)}\n\n"
        f"Call {result}_of_{many} with a list of {many}."
    )


def letter(r: random.Random) -> tuple[str, str]:
    to, by = r.sample(NAMES, 2)
    day, place = r.choice(DAYS), r.choice(PLACES)
    event, first, bring, detail = r.choice(EVENTS)
    prompt = r.choice([
        f"Invite {to} to the {event} in {place} on {day}. Sign it {by}.",
        f"Letter from {by} to {to}: {event}, {place}, {day}.",
    ])
    return prompt, (
        f"Dear {to},\n\nwill you come to the {event} in {place} this {day}? {first.capitalize()}, so please {bring}. "
        f"{detail.capitalize()}, and {habit(place, NAMES)} will {habit(event, ['drive', 'help', 'wait'])} as well. "
        f"I hope to see you in {place}.\n\nYours,\n{by}"
    )


def trade(r: random.Random) -> tuple[str, str]:
    name, place = r.choice(NAMES), r.choice(PLACES)
    job, tools, where, first, makes, done = r.choice(JOBS)
    prompt = r.choice([
        f"What does {name}, a {job} of {place}, do all day?",
        f"Explain the work of {job} {name} in {place}.",
    ])
    return prompt, (
        f"{name} is a {job} and works {where} in {place}. For this {name} needs {tools}. First the {job} {first}. "
        f"Then comes the slow part, and {name} takes a {habit(job, ['short', 'long'])} break. In the end there is "
        f"{makes}. The work is done when {done}. People in {place} say that no other {job} makes such "
        f"{makes.split()[-1]}."
    )


def recipe(r: random.Random) -> tuple[str, str]:
    name, dish = r.choice(NAMES), r.choice(DISHES)
    a, b, c = r.sample(INGREDIENTS, 3)
    prompt = r.choice([
        f"How does {name} make a {dish} of {a[0]}, {b[0]} and {c[0]}?",
        f"Recipe for {name}: {a[0]}, {b[0]}, {c[0]}; it should be a {dish}.",
    ])
    steps = "\n".join(
        f"{i}. {x[1].capitalize()} the {x[0]} and {x[2]} them for {x[4]} minutes until {x[3]}."
        for i, x in enumerate((a, b, c), 1)
    )
    return prompt, (
        f"{name}'s {a[0]} {dish}:\n{steps}\n"
        f"4. Mix the {a[3]} {a[0]} with the {c[3]} {c[0]}, add salt and serve the {dish}."
    )


def plan(r: random.Random) -> tuple[str, str]:
    name, place = r.choice(NAMES), r.choice(PLACES)
    stops = r.sample(OUTINGS, 3)
    hour = r.randint(8, 11)
    prompt = r.choice([
        f"Plan a day in {place} for {name}: {stops[0][0]}, {stops[1][0]}, {stops[2][0]}, from {hour}:00.",
        f"{name} is in {place} at {hour}:00 and wants {stops[0][0]}, {stops[1][0]} and {stops[2][0]}.",
    ])
    lines = "\n".join(
        f"{hour + 2 * i}:00 - {stop[0].capitalize()}: {stop[1]} and talk to {stop[2]}." for i, stop in enumerate(stops)
    )
    return prompt, (
        f"A day in {place} for {name}:\n{lines}\n"
        f"After the {stops[2][0]}, {name} takes the tram back through {place}."
    )


CATEGORIES: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "story": story, "checklist": checklist, "sums": sums, "record": record, "code": code, "letter": letter,
    "trade": trade, "recipe": recipe, "plan": plan,
}


def example(r: random.Random) -> Example:
    """One prompt and answer of a random category."""
    category = r.choice(list(CATEGORIES))
    return Example(category, *CATEGORIES[category](r))


def runs(prompt: str) -> set[tuple[str, ...]]:
    """Every run of RUN words of a prompt; the whole prompt if it is shorter."""
    words = prompt.lower().replace(",", " ").replace(".", " ").replace(":", " ").replace("?", " ").split()
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def prompts(seed: int, count: int, avoid: set[tuple[str, ...]]) -> list[Example]:
    """`count` different prompts, categories in turn, none with a run of words in `avoid`."""
    r = random.Random(seed)
    names = list(CATEGORIES)
    found: dict[str, Example] = {}
    while len(found) < count:
        category = names[len(found) % len(names)]
        candidate = Example(category, *CATEGORIES[category](r))
        if candidate.prompt not in found and not runs(candidate.prompt) & avoid:
            found[candidate.prompt] = candidate
    return list(found.values())


def held_out_and_training(held_out: int, training: int) -> tuple[list[Example], list[Example]]:
    """Held-out and training prompts that share no run of RUN words."""
    first = prompts(11, held_out, set())
    avoid = set().union(*(runs(e.prompt) for e in first))
    return first, prompts(12, training, avoid)
