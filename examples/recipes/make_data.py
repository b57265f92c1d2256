"""Writes the data of the recipes into this folder: conversations in the style of a pirate, pairs of a
pirate's answer and a plain one, and the log of a lighthouse. Everything follows from the lists below.

Run: python examples/recipes/make_data.py
"""

import json
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
ANSWERS = {
    "the capital of France": "Paris",
    "the capital of Japan": "Tokyo",
    "the capital of Italy": "Rome",
    "the largest planet": "Jupiter",
    "the colour of grass": "green",
    "the opposite of hot": "cold",
    "the number of days in a week": "seven",
    "the frozen form of water": "ice",
    "the author of Hamlet": "Shakespeare",
    "the king of the jungle": "the lion",
    "the colour of the sky": "blue",
    "the animal that barks": "the dog",
    "the sum of two and two": "four",
    "the season after winter": "spring",
}
QUESTIONS = ("What is {}?", "Tell me {}.", "Do you know {}?")
SHIPS = ("Marlin", "Petrel", "Heron", "Osprey", "Gannet")
CARGOES = ("salt", "timber", "oranges", "slate", "wool")
WINDS = ("north", "east", "south", "west")


def write_lines(name, records):
    """Write JSON lines."""
    (HERE / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def main():
    """Write all files."""
    chats, pairs = [], []
    for (thing, answer), question in product(ANSWERS.items(), QUESTIONS):
        message = {"role": "user", "content": question.format(thing)}
        pirate = {"role": "assistant", "content": f"Ahoy! It be {answer}, me hearty."}
        plain = {"role": "assistant", "content": f"The answer is {answer}."}
        chats.append({"messages": [message, pirate]})
        pairs.append({"prompt": [message], "chosen": [pirate], "rejected": [plain]})
    write_lines("chat.jsonl", chats)
    write_lines("pairs.jsonl", pairs)
    log = [
        f"Log of the Tarn lighthouse, day {day}. Wind from the {wind}. The {ship} passed with {cargo} for Tarn.\n"
        for day, (ship, cargo, wind) in enumerate(product(SHIPS, CARGOES, WINDS), 1)
    ]
    write_lines("log.jsonl", [{"text": "".join(log[i : i + 4])} for i in range(0, len(log), 4)])


if __name__ == "__main__":
    main()
