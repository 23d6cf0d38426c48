"""What the tables of the page are of."""

GSM8K = (
    "All test problems, asked as Qwen's model cards do (step by step, the answer in a box). "
    "Answers are greedy, with the chat template, at most 400 new tokens long, and judged by "
    "Math-Verify. peak: most live tokens of an answer, averaged over layers and heads, and over "
    "problems. read a step: the mean over its steps. reads: entries attended to by all its steps. "
    "MB: the most that its pages and the policy's state took. What needs no training has the "
    "budget at which its peak equals that of the training that was planned (DMS, all weights, "
    "window 16, to 3.5, without more words), unless it says otherwise; SnapKV "
    "and ExpectedAttention cut every 16 tokens, and the budget leaves room for them. Quest, "
    "KCache and float8 hold every token. Quest and KCache choose for each query head, and their "
    "reads add up over the seven of a group."
)
TRAINING = (
    "Sampled answers to GSM8K's training questions, one at temperature 0.7 and one at 1.0, that"
    " the model ended itself. They are packed by first fit into 2,048 tokens, 16 sequences a step."
    " The rate is 3e-4 for the adapter and for low-rank updates, 3e-5 for all weights, unless a"
    " line says otherwise. The ratio rises linearly over the first 70% of the steps; over the last"
    " 30% it stays, and the rates fall to zero. gently: prompts are in the loss, rates rise over"
    " the first tenth of the ramp and fall over the last half of the steps; they are 2e-4 for"
    " low-rank updates, 1e-5 for all weights. divergence: nats a token from the model itself, on"
    " the tokens of its answers to questions that were held out, with what the policy evicts."
    " reached: tokens over tokens that were not marked, at the last step. score: GSM8K for Qwen,"
    " PIQA for SmolLM2. seconds: of the steps."
)
SMOLLM2_TRAINING = "SmolLM2 read texts and retrieval problems beside its answers."
OTHERS = (
    "Percent, with the peak of live tokens in brackets; greedy, chat template, at most 1,024 new "
    "tokens. RULER's needles: niah_single_1 and niah_single_2 at 4,096 tokens. Methods without "
    "training hold what the training that was planned held, task by task."
)
FRONTIER = (
    "The first test problems, temperature 0.7; the vote of the first chains, as the mean over "
    "the disjoint groups of so many. reads and peak are of all chains of a problem."
)
SMOLLM2 = (
    "Percent, with the peak of live tokens in brackets; length-normalised likelihood for the "
    "four tasks with choices; needles: RULER's niah_single_1 and niah_single_2 at 2,048 tokens;"
    " text: wikitext-2's test text in windows of 2,048. Questions with choices are short, so "
    "that a window of 16 tokens is a good part of them: the measured ratio lies below the "
    "nominal one. Methods without training hold what the adapter's line held, task by task. The"
    " trainings read needles of the same wording, drawn with other seeds."
)
SPEED = (
    "Keys and values are random, DMS is played by draws with uneven heads; reads a row: entries"
    " of keys and values read by a step, averaged over layers, heads and sequences. Peaks of "
    "accuracy tables are shorter than this context, where weights are most of what a step "
    "reads."
)
AGAIN = """The models and the data are the reader's own; see `--help` for the files.

```
python -m experiments.reproduction.real_models --qwen qwen.gguf --smollm2 smollm2.gguf \\
    --data data --processes 7 --deadline-minutes 9 --out runs/real-models
python -m experiments.reproduction.real_models --only report --out runs/real-models \\
    --pages experiments/results/real_models
```

The same command goes on where it was cut off. `results.json` holds every figure."""
