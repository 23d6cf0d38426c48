"""Records in the published forms of the data sets, with invented questions."""

import json

GSM8K = [
    {
        "question": "Ann has 3 boxes of 4 pears and eats 2. How many pears are left?",
        "answer": "There are 3*4=<<3*4=12>>12 pears.\nShe has 12-2=<<12-2=10>>10 left.\n#### 10",
    },
    {
        "question": "A tram carries 1,150 people, and 50 get off. How many stay?",
        "answer": "1150-50=<<1150-50=1100>>1,100 people.\n#### 1,100",
    },
]
MATH500 = [
    {
        "problem": "Write the point $(0,2)$ in polar coordinates.",
        "solution": "The radius is 2: $\\boxed{\\left( 2, \\frac{\\pi}{2} \\right)}.$",
        "answer": "\\left( 2, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/1.json",
    },
    {
        "problem": "What is half of one?",
        "solution": "It is $\\boxed{\\frac{1}{2}}.$",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/2.json",
    },
]
AIME = [
    {"id": 60, "problem": "Find $n$.", "solution": "It is 33.", "answer": "033", "year": "2024"}
]
GPQA_CSV = (
    "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    'r1,"Which of these,\nat rest, is lightest?",an electron,a proton,a neutron,a muon\n'
    "r2,Which is a prime?,7,4,6,9\n"
)


def lines(path, records):
    """Writes JSON lines and returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def text(path, content):
    """Writes a text and returns the path."""
    path.write_text(content)
    return path
