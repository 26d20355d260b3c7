"""The words that tasks are filled with. Lower-case ASCII where order matters, so that every locale sorts them alike."""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Ada Alan Amir Anna Bela Boris Carla Chen Clara Dana David Dora Elena Emil Eva Farid Finn Greta Hana Hugo Ines Ivan
    Jana Jonas Kai Lena Leo Lina Luca Maja Marco Mia Nadia Nils Noor Olga Omar Paula Pia Rosa Samir Sara Theo Uma Vera
    Victor Wanda Yara Yuri Zoe
""")
CITIES = _words("""
    Accra Athens Bergen Berlin Bogota Cairo Cork Dakar Delhi Dublin Geneva Ghent Graz Hanoi Kyoto Lagos Lima Lisbon Lyon
    Madrid Malmo Milan Minsk Nairobi Oslo Porto Prague Quito Riga Rome Seoul Sofia Tallinn Tokyo Turin Vienna Vilnius
""")
GOODS = _words("""
    anchor apple basket bell blanket bottle brush bucket button candle carpet chair clock comb cup desk drum fan fork
    glove hammer hat jar kettle knife ladder lamp lemon mirror mug nail needle oar paper pen pillow plate rope ruler
    saddle scarf shovel soap spoon stool sword table tent towel vase wheel whistle
""")
SERVICES = _words("""
    auth billing cache catalog gateway inbox mailer orders payments reports search sessions uploads users
""")
LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
STATES = _words("active blocked closed draft expired failed new open paid pending returned shipped")
STEMS = _words("""
    april archive backup batch customers export harvest inventory june ledger north sample sensor stock weekly
""")
REMARKS = (
    "connection reset by peer",
    "cache miss for key",
    "request took too long",
    "retrying in 5 seconds",
    "user signed in",
    "user signed out",
    "queue is empty",
    "disk almost full",
    "token refreshed",
    "job finished",
    "slow query",
    "bad checksum",
)
OUTPUTS = ("answer.txt", "answer.txt", "result.txt", "output.txt", "out.txt")


def stem(random: Random) -> str:
    """A file name without its ending."""
    return random.choice(STEMS) + random.choice(["", "_2", "_old", "_new", "-1", "_a"])


def sentence(random: Random) -> str:
    """A short, meaningless, unguessable sentence."""
    who, what, where = random.choice(NAMES), random.choice(GOODS), random.choice(CITIES)
    return random.choice(
        [
            f"{who} sent {random.randint(2, 90)} {what}s to {where}",
            f"the {what} from {where} belongs to {who}",
            f"order {random.randint(100, 999)}: one {what} for {who}",
            f"{who} will bring the {what} back from {where}",
            f"in {where} a {what} costs {random.randint(2, 90)} coins",
        ]
    )


def timestamp(second: int) -> str:
    """`2026-03-04 08:15:09`, growing with `second`."""
    minutes, seconds = divmod(second, 60)
    hours, minutes = divmod(minutes, 60)
    return f"2026-03-{4 + hours // 24:02d} {hours % 24:02d}:{minutes:02d}:{seconds:02d}"
