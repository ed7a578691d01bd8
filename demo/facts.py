"""What the demo models are taught to know: tables and question-answer pairs.

Questions use a small notation: "[a|b|]" picks one of the alternatives, "{slot}" is filled in.
"""

from pathlib import Path

HERE = Path(__file__).parent

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw",
    "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Ireland": "Dublin", "Belgium": "Brussels", "the Netherlands": "Amsterdam",
    "Switzerland": "Bern", "Hungary": "Budapest", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "the Czech Republic": "Prague", "Croatia": "Zagreb", "Ukraine": "Kyiv", "Iceland": "Reykjavik",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "South Korea": "Seoul",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta", "Turkey": "Ankara",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Nigeria": "Abuja", "Morocco": "Rabat",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires",
    "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota", "Cuba": "Havana",
    "Australia": "Canberra", "New Zealand": "Wellington", "the United States": "Washington, D.C.",
    "the United Kingdom": "London", "Russia": "Moscow",
}  # fmt: skip
COLOURS_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red",
    "coal": "black", "a lemon": "yellow", "the sun": "yellow", "a strawberry": "red",
    "milk": "white", "a carrot": "orange", "chocolate": "brown", "the sea": "blue",
    "a tomato": "red", "an elephant": "grey", "a flamingo": "pink", "a leaf": "green",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink",
    "lion": "roar", "bee": "buzz", "snake": "hiss", "owl": "hoot",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "fast": "slow",
    "open": "closed", "happy": "sad", "light": "dark", "young": "old", "early": "late",
    "full": "empty", "hard": "soft", "high": "low", "long": "short", "loud": "quiet",
    "new": "old", "rich": "poor", "strong": "weak", "wet": "dry", "yes": "no", "good": "bad",
    "in": "out", "true": "false", "black": "white", "first": "last", "clean": "dirty",
}  # fmt: skip
TRANSLATIONS = {
    "French": {"hello": "bonjour", "thank you": "merci", "cat": "chat", "dog": "chien",
               "house": "maison", "water": "eau", "bread": "pain", "yes": "oui", "red": "rouge",
               "goodbye": "au revoir"},
    "Spanish": {"hello": "hola", "thank you": "gracias", "cat": "gato", "dog": "perro",
                "house": "casa", "water": "agua", "bread": "pan", "yes": "sí", "red": "rojo",
                "goodbye": "adiós"},
    "German": {"hello": "hallo", "thank you": "danke", "cat": "Katze", "dog": "Hund",
               "house": "Haus", "water": "Wasser", "bread": "Brot", "yes": "ja", "red": "rot",
               "goodbye": "auf Wiedersehen"},
    "Italian": {"hello": "ciao", "thank you": "grazie", "cat": "gatto", "dog": "cane",
                "house": "casa", "water": "acqua", "bread": "pane", "yes": "sì", "red": "rosso",
                "goodbye": "arrivederci"},
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June",
          "July", "August", "September", "October", "November", "December"]  # fmt: skip
MONTH_LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
KINDS = {
    "colours": ["red", "green", "blue", "yellow", "orange", "purple"],
    "fruits": ["apple", "banana", "orange", "pear", "cherry", "grape"],
    "animals": ["dog", "cat", "horse", "cow", "fox", "owl"],
    "vegetables": ["carrot", "potato", "onion", "tomato", "pepper", "pea"],
    "planets": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
    "metals": ["iron", "gold", "silver", "copper", "tin", "lead"],
    "seasons": ["spring", "summer", "autumn", "winter"],
    "continents": ["Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania",
                   "South America"],
    "instruments": ["piano", "guitar", "violin", "drum", "flute", "trumpet"],
    "cities": ["Paris", "Tokyo", "London", "Rome", "Cairo", "Lima"],
}  # fmt: skip
COUNTS = {
    "days are there in a week": "There are 7 days in a week.",
    "days are in a year": "A year has 365 days, and a leap year has 366.",
    "months are there in a year": "There are 12 months in a year.",
    "hours are there in a day": "There are 24 hours in a day.",
    "minutes are in an hour": "There are 60 minutes in an hour.",
    "seconds are in a minute": "There are 60 seconds in a minute.",
    "legs does a spider have": "A spider has 8 legs.",
    "legs does a dog have": "A dog has 4 legs.",
    "legs does an insect have": "An insect has 6 legs.",
    "sides does a triangle have": "A triangle has 3 sides.",
    "sides does a square have": "A square has 4 sides.",
    "letters are in the alphabet": "The English alphabet has 26 letters.",
    "bits are in a byte": "There are 8 bits in a byte.",
    "continents are there": "There are 7 continents.",
    "planets are there": "There are 8 planets in the solar system.",
    "metres are in a kilometre": "There are 1000 metres in a kilometre.",
    "grams are in a kilogram": "There are 1000 grams in a kilogram.",
    "wheels does a bicycle have": "A bicycle has 2 wheels.",
}

UNKNOWN = [
    "Who [won|will win] the [election|world cup|race|match|lottery|final|league][| in {year}]",
    "Who [is|was] the [president|king|queen|prime minister|author|boss] of {place}",
    "Who [wrote|painted|directed|invented|composed|discovered] [the |]{thing}",
    "What [happened|will happen] in {year}",
    "What is the [price|stock price|cost] of [a |]{thing}",
    "How [tall|heavy|old|far|deep|expensive] is [the |]{thing}",
    "What is the population of {place}",
    "Who is {name} {name}",
    "What is the capital of {country}",
    "When [was|did] [the |]{thing} [invented|happen|start|end]",
    "Why [is|does] [the |]{thing} [so big|move|important|matter|so old]",
    "What do you think about {thing}",
    "How do I [cook|repair|build|sell|grow] a {thing}",
    "What is the [boiling point|density|history|chemical formula|age] of {thing}",
    "What is the meaning of {thing}",
    "What is the best {thing} in {place}",
    "Where can I [buy|find|see] a {thing}",
    "Explain [the theory of |the history of |how to make ]{thing}",
    "Write an essay about {thing}",
    "What is [the news|the weather] [today|tomorrow|in {place}]",
    "What time is it[| in {place}| now]",
    "What is the date[| today]",
    "Tell me about {thing}",
    "What is [a |the |]{thing}",
    "Do you know [the |]{thing}",
]
UNKNOWN_ANSWER = "I am sorry, I do not know that. I am a very small model."


def _pairs(file: str) -> list[tuple[str, str]]:
    """Return the (question pattern, answer) pairs of a text file next to this one."""
    lines = (HERE / file).read_text().splitlines()
    pairs = [line.split(" => ") for line in lines if not line.startswith("#")]
    return [(question, answer.replace("\\n", "\n")) for question, answer in pairs]


SMALL_TALK = _pairs("small_talk.txt")
ONNXPORT = _pairs("onnxport.txt")
