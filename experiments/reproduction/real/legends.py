"""What the tables of the page are of."""

GSM8K = (
    "All test problems, asked as Qwen's model cards do (step by step, the answer in a box). "
    "Answers are greedy, with the chat template, at most 400 new tokens long, and judged by "
    "Math-Verify. peak: most live tokens of an answer, averaged over layers and heads, and over "
    "problems. read a step: the mean over its steps. reads: entries attended to by all its steps. "
    "MB: the most that its pages and the policy's state took.\n\n"
    "What needs no training has the budget at which its peak equals that of the judged retrofit "
    "(in bold), unless it says otherwise; SnapKV and ExpectedAttention cut every 16 tokens, and "
    "the budget leaves room for them. KVpop has that budget too, and KVzap the threshold that was "
    "measured to hold that peak within 2%. Quest, KCache and float8 hold every token. "
    "Quest and KCache choose for each query head, and their reads add up over the seven of a "
    "group."
)
TRAINING = (
    "Answers to GSM8K's training questions, one at temperature 0.7, one at 1.0 and one greedy, "
    "that the model ended itself, packed by first fit into 2,048 tokens, 16 sequences a step; run "
    "1 had no greedy ones, and 1,000 questions more. DMS is "
    "trained as `recipes.dms_self_taught` says: prompts are in the loss; the ratio rises linearly "
    "over half of the steps and then stays, while the rates fall to zero (2e-4 for low-rank "
    "updates, 1e-5 for all weights, 3e-4 for the adapter). The control has the same tokens, "
    "rates and low-rank updates, and learns to predict the answers instead. What took 0.3 of the "
    "tokens is compared among itself, with the same lessons in the same order.\n\n"
    "from attention first: `recipes.dms_warm_up`, a fifth of the steps teaches the adapter which "
    "tokens later queries attend to. with a floor a layer: `recipes.dms_layer_floor`. KVzap and "
    "KVpop: scorers alone, beside frozen weights. DMC: all weights, 1e-4, no prompts in the "
    "loss.\n\n"
    "divergence: nats a token from the model itself, on the tokens of its answers to questions "
    "that were held out, with what the policy evicts. reached: tokens over tokens that were not "
    "marked, at the last step. score: GSM8K, greedy, for Qwen, PIQA for SmolLM2. seconds: of the "
    "steps, alone on the card; in run 1, and of SmolLM2, beside two other processes."
)
SMOLLM2_TRAINING = "SmolLM2 read texts and retrieval problems beside its answers."
OTHERS = (
    "Percent, with the peak of live tokens in brackets; greedy, chat template, at most 1,024 new "
    "tokens. RULER's needles: niah_single_1 and niah_single_2 at 4,096 tokens. Methods without "
    "training hold what the judged retrofit held, task by task."
)
FRONTIER = (
    "Eight chains of each test problem, temperature 0.7; the vote of so many of them, as the mean "
    "over the disjoint groups. reads and peak are of all chains of a problem."
)
SMOLLM2 = (
    "Percent, with the peak of live tokens in brackets; length-normalised likelihood for the "
    "four tasks with choices; needles: RULER's niah_single_1 and niah_single_2 at 2,048 tokens;"
    " text: wikitext-2's test text in windows of 2,048. Questions with choices are short, so "
    "that a window of 16 tokens is a good part of them: the measured ratio lies below the "
    "nominal one. The adapter is the [one that ships](../../../dms_jax/assets/"
    "smollm2-135m-instruct-dms/README.md). Methods without training hold what its line held, task "
    "by task. The trainings read needles of the same wording, drawn with other seeds."
)
SPEED = (
    "Keys and values are random, DMS is played by draws with uneven heads; reads a row: entries"
    " of keys and values read by a step, averaged over layers, heads and sequences. Peaks of "
    "accuracy tables are shorter than this context, where weights are most of what a step "
    "reads."
)
AGAIN = """The library is installed; the models and the data are the reader's own (`--help` says
which files, and the first lines of this page which models). On one GPU, or on several that workers
take turns on:

```
python -m experiments.reproduction.real_models --qwen qwen.gguf --smollm2 smollm2.gguf \\
    --data data --processes 2 --out runs/real-models --run 3 \\
    --earlier experiments/results/real_models/results.json --pages runs/real-models/page
```

The page of the new run shows beside it what runs 1 and 2 measured and it did not.
`--deadline-minutes 20` ends the command after that time, and the same command goes on where it was
cut off. `--trainings` and `--judged` choose what is trained and what the verdicts are about; with
`--judged warm-up-w16` it is run 3.

On two GPUs as run 2: one samples, trains and is timed by the three commands, while the other asks
and then trains what is left; the first joins it.

```
export QWEN=$PWD/qwen.gguf QUESTIONS=$PWD/data/gsm8k/train.jsonl
mkdir -p runs/real-models
CUDA_VISIBLE_DEVICES=1 python -m experiments.reproduction.real_models --qwen qwen.gguf \\
    --smollm2 smollm2.gguf --data data --out runs/real-models --shards 1 \\
    --self-taught runs/three/run --only jobs &
CUDA_VISIBLE_DEVICES=0 bash experiments/reproduction/real/three_commands.sh runs/three
CUDA_VISIBLE_DEVICES=0 python -m experiments.reproduction.real_models --out runs/real-models --join
wait
mkdir -p runs/real-models/three && cp runs/three/three.json runs/real-models/three/
python -m experiments.reproduction.real_models --only report --out runs/real-models --run 3 \\
    --earlier experiments/results/real_models/results.json --pages runs/real-models/page
```

In run 2 SmolLM2 was asked by a plan of its own: `--smollm2 smollm2.gguf --data data --processes 3
--shards 1 --lanes 2048 --small-tokens 6000000 --trainings smollm2-low-rank-w16 smollm2-control
smollm2-adapter-w16`; its `results` and `summaries` were copied into the run directory before the
report. `results.json` holds every figure."""
