"""CSV files: columns, sums, groups, joins."""

from __future__ import annotations

from collections import defaultdict
from random import Random

from turngate.tasks.dataops.template import Draft, Template, lines, number, table, text
from turngate.tasks.dataops.vocabulary import CITIES, GOODS, NAMES, OUTPUTS, STATES, stem
from turngate.tasks.steps import Bash, Say, Step

Row = dict[str, str]


def sales(random: Random, rows: int, cities: int = 5, column: str = "amount") -> list[Row]:
    """Rows with id, name, city, state and a number."""
    names = random.sample(NAMES, rows) if rows <= len(NAMES) else random.choices(NAMES, k=rows)
    places, states = random.sample(CITIES, cities), random.sample(STATES, 3)
    return [
        {
            "id": str(1000 + place),
            "name": name,
            "city": random.choice(places),
            "state": random.choice(states),
            column: str(random.randint(10, 990)),
        }
        for place, name in enumerate(names)
    ]


def as_csv(rows: list[Row], separator: str = ",") -> str:
    """Header and rows."""
    return text([separator.join(rows[0]), *(separator.join(row.values()) for row in rows)])


def column(random: Random, index: int) -> Draft:
    """One column without its header."""
    out, file = random.choice(OUTPUTS), f"{stem(random)}.csv"
    separator, called = [(",", "comma"), (";", "semicolon"), (",", "comma")][index % 3]
    rows = sales(random, random.randint(10, 30))
    name = random.choice(["name", "city", "state", "amount"])
    place = list(rows[0]).index(name) + 1
    wanted = [row[name] for row in rows]
    header = separator.join(rows[0])
    instruction = random.choice(
        [
            f"The first line of {file} is `{header}`. Write the {name} column, without this, to {out}, one a line.",
            f"{file} has the columns `{header}`. Save all values of {name}, one on each line, as {out}; no header.",
            f"Extract column {place} ({name}) from {file}, whose fields are separated by a {called}. Skip the header "
            f"line. Put the values into {out}, one a line.",
            f"Create {out} with the {name} of every row in {file} (header `{header}`), in order, without the header.",
        ]
    )
    command = f"tail -n +2 {file} | cut -d'{separator}' -f{place} > {out}"
    checks = [lines(out, wanted, [[name, *wanted]])]
    return Draft(instruction, {file: as_csv(rows, separator)}, checks, [Bash(command=command), Say(text="Done.")])


def sum_column(random: Random, index: int) -> Draft:
    """Sum, largest or filtered sum of a column."""
    out, file = random.choice(OUTPUTS), f"{stem(random)}.csv"
    what = random.choice(["amount", "price", "points", "hours"])
    rows = sales(random, random.randint(12, 40), column=what)
    values, city = [int(row[what]) for row in rows], rows[0]["city"]
    chosen = [int(row[what]) for row in rows if row["city"] == city]
    asked, command, value = [
        (f"sum of the {what} column", f"awk -F, 'NR>1 {{s+=$5}} END {{print s}}' {file} > {out}", sum(values)),
        (f"largest {what}", f"tail -n +2 {file} | cut -d, -f5 | sort -n | tail -n 1 > {out}", max(values)),
        (
            f"sum of {what} over the rows whose city is {city}",
            f"""awk -F, '$3=="{city}" {{s+=$5}} END {{print s}}' {file} > {out}""",
            sum(chosen),
        ),
    ][index % 3]
    header = ",".join(rows[0])
    instruction = random.choice(
        [
            f"{file} starts with the header `{header}`. Write the {asked} to {out}, just the number.",
            f"What is the {asked} in {file} (columns `{header}`)? Put only the number into {out}.",
            f"Compute the {asked} of {file}; its columns are `{header}`. Save the number as {out}.",
            f"I need the {asked} from {file}. Its header is `{header}`. {out} should contain the number only.",
        ]
    )
    return Draft(instruction, {file: as_csv(rows)}, [number(out, value)], [Bash(command=command), Say(text="Done.")])


def group_totals(random: Random, index: int) -> Draft:
    """Totals by a column that must be looked up in the file."""
    file, out = f"{stem(random)}.csv", f"{random.choice(['totals', 'summary', 'by_group'])}.csv"
    rows = sales(random, random.randint(16, 36), cities=6)
    random.shuffle(rows)
    by = ("city", "state")[index % 2]
    place = list(rows[0]).index(by) + 1
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[row[by]] += int(row["amount"])
    head, ordered = [by, "total"], [[key, totals[key]] for key in sorted(totals)]
    instruction = random.choice(
        [
            f"Add up the amount for each {by} in {file}. Write {out} with the header `{by},total` and a row for each "
            f"{by}, sorted by {by}.",
            f"Make {out}, a CSV with the columns {by} and total: the sum of amount of every {by} in {file}, ordered by "
            f"{by}. Include the header line `{by},total`.",
            f"{file} is a CSV with a header. For every {by} compute the total amount; save it as {out} with header "
            f"`{by},total`, rows sorted by {by}.",
        ]
    )
    unsorted = [[key, total] for key, total in totals.items()]
    checks = [table(out, [head, *ordered], [ordered, [head, *unsorted], [head, *reversed(ordered)]])]
    steps: list[Step] = [
        Bash(command=f"head -n 3 {file}"),
        Bash(command=f"echo '{by},total' > {out}"),
        Bash(
            command=f"awk -F, 'NR>1 {{t[${place}]+=$5}} END {{for (k in t) print k\",\"t[k]}}' {file} | sort >> {out}"
        ),
        Say(text=f"The totals by {by} are in {out}."),
    ]
    return Draft(instruction, {file: as_csv(rows)}, checks, steps)


def join_tables(random: Random, index: int) -> Draft:
    """Two tables by id; one of them is not sorted, and some ids have no partner."""
    left, right = f"{random.choice(['people', 'clients', 'staff'])}.csv", f"{random.choice(['orders', 'stock'])}.csv"
    out, count = f"{random.choice(['joined', 'merged', 'both'])}.csv", random.randint(12, 20)
    people = [{"id": row["id"], "name": row["name"]} for row in sales(random, count)]
    ids = [*random.sample([row["id"] for row in people], count - 4), "3001", "3002"]
    random.shuffle(ids)
    things = [{"id": one, "item": random.choice(GOODS), "count": str(random.randint(2, 90))} for one in ids]
    partner = {row["id"]: row for row in things}
    head = ["id", "name", "item", "count"]
    wanted = [
        [row["id"], row["name"], partner[row["id"]]["item"], partner[row["id"]]["count"]]
        for row in people
        if row["id"] in partner
    ]
    instruction = random.choice(
        [
            f"Join {left} and {right} by id into {out} with the header `id,name,item,count`. Only ids that are in both "
            "files; sorted by id.",
            f"Merge the two CSV files {left} and {right} on the id column. Write {out}: columns id,name,item,count "
            "with header, rows in order of id, ids missing in either file left out.",
            f"Create {out} (header `id,name,item,count`, sorted by id) from {left} and {right}: one row for each id "
            "that both files have.",
        ]
    )
    steps: list[Step] = [
        Bash(command=f"head -n 3 {left} {right}"),
        Bash(command=f"echo 'id,name,item,count' > {out}"),
        Bash(command=f"tail -n +2 {right} | sort > sorted.csv; tail -n +2 {left} | join -t, - sorted.csv >> {out}"),
        Bash(command=f"head -n 3 {out}"),
        Say(text=f"{out} has the joined rows."),
    ]
    by_id = {row["id"]: row["name"] for row in people}
    as_found = [[row["id"], by_id[row["id"]], row["item"], row["count"]] for row in things if row["id"] in by_id]
    checks = [table(out, [head, *wanted], [wanted, [head, *as_found]])]
    return Draft(instruction, {left: as_csv(people), right: as_csv(things)}, checks, steps)


def best_row(random: Random, index: int) -> Draft:
    """Who has the largest or smallest value."""
    out, file = random.choice(OUTPUTS), f"{stem(random)}.csv"
    names = random.sample(NAMES, random.randint(15, 35))
    points = random.sample(range(100, 999), len(names))
    rows = [
        {"name": name, "city": random.choice(CITIES), "points": str(p)} for name, p in zip(names, points, strict=True)
    ]
    most = index % 2 == 0
    best = (max if most else min)(rows, key=lambda row: int(row["points"]))
    word, flag = ("most", "-rn") if most else ("fewest", "-n")
    instruction = random.choice(
        [
            f"{file} has the columns `name,city,points`. Write the name with the {word} points to {out}.",
            f"Who has the {word} points in {file} (columns `name,city,points`)? Put only the name into {out}.",
            f"Find the row of {file} with the {word} points and save its name as {out}. Header: `name,city,points`.",
        ]
    )
    command = f"tail -n +2 {file} | sort -t, -k3 {flag} | head -n 1 | cut -d, -f1 > {out}"
    checks = [lines(out, [best["name"]], [[",".join(best.values())]])]
    return Draft(instruction, {file: as_csv(rows)}, checks, [Bash(command=command), Say(text="Done.")])


TEMPLATES = (
    Template("csv-column", 2, "one column of a CSV, without its header", column),
    Template("csv-sum", 2, "sum, largest or filtered sum of a column", sum_column),
    Template("csv-groups", 3, "totals by city or state, as a sorted CSV", group_totals),
    Template("csv-join", 3, "inner join of two CSV files by id", join_tables),
    Template("csv-best", 2, "the name with the most or fewest points", best_row, held_out=True),
)
