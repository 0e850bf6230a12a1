"""The tiny target's world: seeded prompts and answers in nine categories, all of it written here.

An answer is a function of its prompt wherever a reader would expect one (what a baker uses, how an
onion is prepared, what 34 + 58 is), so greedy answers to different prompts differ; words that nothing
in the prompt decides are drawn at random. `held_out_and_training` splits prompts so that no run of
five words of a held-out prompt stands in any training prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

RUN = 5  # words: no longer run is shared by held-out and training prompts


@dataclass(frozen=True)
class Example:
    category: str
    prompt: str
    answer: str


def bank(text: str) -> list[list[str]]:
    """Rows separated by newlines, fields by `|`."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().splitlines()]


NAMES = """Ada Anton Bela Bruno Cleo Dario Edda Emil Fanny Felix Greta Hugo Ida Igor Jonas Juno Kira Klaus Lena Linus
Mara Milo Nadia Nico Olga Oskar Paula Pedro Quirin Rosa Rufus Selma Simon Tessa Theo Ulla Viktor Wanda Xenia Yara
Yusuf Zora Alma Bodo Celia Detlef Elsa Fritz Gisela Hanno Ines Jakob Katja Lorenz Minna Nils Ottilie Pia Ralf
Svenja Till Ursel Vera Willi""".split()
PLACES = """Lisbon Bergen Kyoto Quito Dakar Turin Galway Riga Cusco Hobart Malmo Tunis Porto Osaka Leeds Bern Lagos
Hanoi Split Graz Nantes Oslo Tartu Seville Boston Bogota Cairo Delhi Perth Sofia Vilnius Zagreb""".split()
COLOURS = "amber black blue brown copper crimson green grey ivory olive pink purple red silver white yellow".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
HOBBIES = """chess sailing pottery baking climbing fencing gardening painting rowing singing skating weaving archery
cycling drumming fishing juggling knitting origami running""".split()
ANIMALS = bank("""
fox | clever | a den under an oak | berries | run without a sound
owl | patient | a hollow tower | mice | see in the dark
bear | strong | a cave by the falls | honey | lift heavy stones
otter | playful | a bend of the river | fresh fish | dive for hours
mouse | careful | a hole behind the stove | crumbs | slip through any gap
heron | quiet | the reeds | frogs | stand still all day
goat | stubborn | a steep meadow | thistles | climb any cliff
hare | nervous | a field of barley | clover | leap over hedges
badger | grumpy | a deep burrow | roots | dig through the night
swan | proud | a still pond | water weed | glide without a ripple
raven | curious | the old church | seeds | remember every face
turtle | slow | a sandy bay | sea grass | wait for a whole year
wolf | loyal | the pine forest | cold meat | follow a trail for miles
lizard | lazy | a warm wall | flies | vanish into cracks
donkey | gentle | a barn with no door | hay | carry any load
squirrel | busy | a tall beech | nuts | hide things well
""")
OBJECTS = bank("""
lantern | glowed in the grass | showed the way home | light
key | lay under a stone | opened the garden gate | doors
map | floated in a puddle | led to a hidden well | roads
drum | rolled down the hill | woke the whole village | music
mirror | leaned on a tree | showed tomorrow's weather | truth
kite | hung in the branches | pulled the clouds away | wind
coin | shone in the mud | bought bread for everyone | luck
bell | rang below the bridge | called the lost sheep | home
book | stood on a fence | told stories at night | words
boat | drifted to the bank | crossed the wide lake | water
clock | ticked inside a log | stopped the rain at noon | time
rope | was tied to a rock | pulled a cart from the ditch | friends
hat | sat on a scarecrow | kept the snow away | winter
flute | whistled in the wind | calmed the angry bees | song
""")
JOBS = bank("""
baker | dough, flour and an oven | before sunrise | kneads the dough | warm bread | the loaf sounds hollow
carpenter | wood, nails and a saw | in a workshop | measures each board | a solid table | nothing wobbles
doctor | charts and a thermometer | in a clinic | listens to the heart | a clear plan | the fever falls
farmer | seed, soil and a tractor | on open fields | ploughs the ground | a rich harvest | the barn is full
gardener | spades, shears and compost | between the beds | trims the hedge | bright flowers | the bees return
pilot | maps, dials and a radio | high in the air | checks the fuel | a smooth flight | the wheels touch down
plumber | pipes, valves and a wrench | under the sink | closes the main tap | a dry floor | the dripping stops
tailor | cloth, thread and pins | beside a window | marks the seams | a neat coat | the sleeves sit well
teacher | chalk, books and questions | in a classroom | explains the task | new ideas | every pupil can answer
sailor | ropes, sails and a compass | on the open sea | reads the wind | a safe crossing | the harbour is in sight
nurse | bandages and clean water | on a busy ward | washes the wound | quick relief | the patient can sleep
painter | brushes, oil and canvas | in a bright studio | mixes the colours | a lively picture | the paint is dry
mason | stones, lime and a trowel | on a scaffold | levels the first row | a straight wall | the line is true
cook | pans, knives and spices | behind the counter | chops the onions | a hot meal | the plates come back empty
miller | grain, stones and sacks | beside the stream | opens the sluice | fine flour | the last sack is tied
potter | clay, water and a wheel | in a dusty shed | centres the clay | round bowls | the glaze shines
fisher | nets, hooks and a boat | off the coast | casts the net | silver herring | the hold is heavy
smith | iron, coal and a hammer | at the forge | heats the bar | sharp tools | the edge is hard
librarian | shelves, cards and silence | among old books | sorts the returns | good advice | each book has its place
beekeeper | hives, smoke and a veil | behind the orchard | lifts the frames | golden honey | the jars are sealed
""")
INGREDIENTS = bank("""
onions | chop | fry | soft | 6
carrots | slice | boil | tender | 9
rice | rinse | simmer | fluffy | 14
lentils | soak | cook | creamy | 20
potatoes | peel | roast | crisp | 30
tomatoes | crush | stew | thick | 12
mushrooms | clean | brown | dark | 7
spinach | wash | steam | bright | 3
beans | drain | heat | warm | 5
pumpkin | cube | bake | sweet | 25
leeks | halve | braise | silky | 11
peppers | core | grill | smoky | 8
barley | toast | cook | chewy | 35
fennel | shave | glaze | golden | 10
cabbage | shred | wilt | glossy | 4
noodles | loosen | boil | springy | 2
""")
DISHES = "soup stew salad pie curry bowl bake broth gratin pilaf".split()
TRIPS = bank("""
picnic | a blanket to sit on | bread for the hungry | a knife for the cheese | cold tea in a flask | a bag for the rubbish
camping trip | a tent against the rain | matches for the fire | a torch for the night | dry socks in a bag | a pot for the soup
school fair | tables for the cakes | a box for the coins | paper for the signs | games for the children | a list of helpers
long hike | boots with good soles | a map of the paths | water in a bottle | nuts for the climb | a whistle for help
beach day | a towel for each child | cream against the sun | a shade that stands | a ball to throw | fruit in a cooler
house move | boxes of strong card | tape for the lids | a cart for the sofa | labels for the rooms | lunch for the friends
night train | a ticket in your pocket | a scarf as a pillow | a novel to read | an early alarm | a snack for later
garden party | lights in the trees | chairs from the shed | juice in big jugs | music that is soft | a plan for rain
bike tour | a pump for the tyres | gloves for the hands | a spare tube | a lock with a key | a coat that folds
winter walk | a cap for the ears | tea with ginger | a stick for the ice | gloves made of wool | a watch for the dusk
film night | a screen on the wall | pillows on the floor | popcorn with salt | a vote on the film | a lamp turned low
museum visit | a plan of the halls | coins for the locker | a pencil for sketches | shoes that are quiet | time for the cafe
""")
EVENTS = bank("""
concert | the choir sings at eight | bring your tickets | the hall is small
wedding | we dance until midnight | wear something blue | the cake has five layers
meeting | we talk about the budget | bring the new numbers | the room is on floor two
exam | it begins with the essay | bring two pens | the bell rings only once
market | the stalls open at dawn | take a large basket | the plums are ripe
parade | the drums go first | stand by the fountain | the street will be closed
rehearsal | we try the second act | learn your lines | the costumes are ready
auction | the clock is sold first | bring some patience | the bids start low
regatta | the boats leave at ten | wear a warm jacket | the wind comes from the west
funeral | we meet at the chapel | bring white flowers | the family is grateful
lecture | it is about glaciers | sit near the front | the slides are in colour
harvest | we pick the last pears | wear old shoes | the ladder is in the barn
""")
OUTINGS = bank("""
museum | look at the old masks | the guard
castle | climb the north tower | the guide
harbour | watch the ferries turn | a sailor
bakery | try the almond rolls | the baker
library | read about the city | a student
market | buy figs and cheese | a farmer
theatre | see the puppet play | an actor
park | rest below the elms | a painter
bridge | count the barges | a fisher
zoo | feed the grey parrots | a keeper
garden | smell the wet roses | a botanist
tower | enjoy the wide view | a tourist
""")
NOUNS = """weights prices scores lengths marks ages steps votes points speeds orders rates heights taxes bills costs
widths depths loads tips fines wages fares rents""".split()
CODE = bank("""
adds up | total | 0 | total += {one} | total
multiplies | product | 1 | product *= {one} | product
counts | count | 0 | count += 1 | count
finds the largest of | best | {many}[0] | best = max(best, {one}) | best
finds the smallest of | least | {many}[0] | least = min(least, {one}) | least
squares | squares | [] | squares.append({one} * {one}) | squares
doubles | doubled | [] | doubled.append(2 * {one}) | doubled
halves | halved | [] | halved.append({one} / 2) | halved
reverses | turned | [] | turned.insert(0, {one}) | turned
collects the even | even | [] | even += [{one}] if {one} % 2 == 0 else [] | even
joins | text | "" | text += str({one}) + " " | text.strip()
averages | total | 0 | total += {one} | total / len({many})
""")


def one_of(items: list[list[str]], word: str) -> list[str]:
    return next(row for row in items if row[0] == word)


def story(r: random.Random) -> tuple[str, str]:
    name, place, colour = r.choice(NAMES), r.choice(PLACES), r.choice(COLOURS)
    animal, trait, home, food, skill = r.choice(ANIMALS)
    thing, found, did, love = r.choice(OBJECTS)
    prompt = r.choice([
        f"Tell me about {name} the {animal} and the {colour} {thing} of {place}.",
        f"A story, please: {animal} {name}, {colour} {thing}, {place}.",
        f"What did {animal} {name} do in {place} with a {colour} {thing}?",
    ])
    return prompt, (
        f"{name} was a {trait} {animal} who lived in {home} near {place}. Nobody else could {skill}. "
        f"One {r.choice(['morning', 'evening', 'night'])}, while {name} looked for {food}, a {colour} {thing} {found}. "
        f'"{love.capitalize()} at last!" cried the {animal}. The {thing} {did}, and {name} shared {food} with all of {place}. '
        f"Since then every {animal} there dreams of {love}."
    )


def checklist(r: random.Random) -> tuple[str, str]:
    name, day, place = r.choice(NAMES), r.choice(DAYS), r.choice(PLACES)
    trip, *items = r.choice(TRIPS)
    count = r.choice([3, 4, 5])
    number = {3: "three", 4: "four", 5: "five"}[count]
    chosen = r.sample(items, count)
    prompt = r.choice([
        f"{name} plans a {trip} near {place} on {day}. Name {number} things to take.",
        f"List {number} things for the {trip} of {name} ({place}, {day}).",
        f"Which {number} things does {name} need for {day}'s {trip} in {place}?",
    ])
    lines = "\n".join(f"{i}. {item.capitalize()}" for i, item in enumerate(chosen, 1))
    return prompt, f"For the {trip} near {place}, {name} should take {number} things:\n{lines}\nPack them before {day} and enjoy {place}!"


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
        f"{detail.capitalize()}, and {r.choice(NAMES)} will {r.choice(['drive', 'help', 'wait'])} as well. "
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
        f"Then comes the slow part, and {name} takes a {r.choice(['short', 'long'])} break. In the end there is {makes}. "
        f"The work is done when {done}. People in {place} say that no other {job} makes such {makes.split()[-1]}."
    )


def recipe(r: random.Random) -> tuple[str, str]:
    name, dish = r.choice(NAMES), r.choice(DISHES)
    a, b, c = r.sample(INGREDIENTS, 3)
    prompt = r.choice([
        f"How does {name} make a {dish} of {a[0]}, {b[0]} and {c[0]}?",
        f"Recipe for {name}: {a[0]}, {b[0]}, {c[0]}; it should be a {dish}.",
    ])
    steps = "\n".join(
        f"{i}. {x[1].capitalize()} the {x[0]} and {x[2]} them for {x[4]} minutes until {x[3]}." for i, x in enumerate((a, b, c), 1)
    )
    return prompt, f"{name}'s {a[0]} {dish}:\n{steps}\n4. Mix the {a[3]} {a[0]} with the {c[3]} {c[0]}, add salt and serve the {dish}."


def plan(r: random.Random) -> tuple[str, str]:
    name, place = r.choice(NAMES), r.choice(PLACES)
    stops = r.sample(OUTINGS, 3)
    hour = r.randint(8, 11)
    prompt = r.choice([
        f"Plan a day in {place} for {name}: {stops[0][0]}, {stops[1][0]}, {stops[2][0]}, from {hour}:00.",
        f"{name} is in {place} at {hour}:00 and wants {stops[0][0]}, {stops[1][0]} and {stops[2][0]}.",
    ])
    lines = "\n".join(f"{hour + 2 * i}:00 - {s[0].capitalize()}: {s[1]} and talk to {s[2]}." for i, s in enumerate(stops))
    return prompt, f"A day in {place} for {name}:\n{lines}\nAfter the {stops[2][0]}, {name} takes the tram back through {place}."


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
