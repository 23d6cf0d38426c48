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
    "group. In the picture what holds everything is dark, what was trained to hold less red, and "
    "what needs no training blue; DMC, KVzap and KVpop were trained on 0.3 of DMS's tokens, and "
    "DMC to a nominal ratio of 4."
)
NOMINAL = (
    "Problems and columns as above. Each was trained on 0.3 of the tokens, and all on the same "
    "lessons in the same order. Methods that have no ratio of their own hold as much as the "
    "low-rank retrofit of that ratio was measured to hold."
)
LONGER = "Needles among more tokens, as above:"
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
    "steps. Alone on the card were what was trained of Qwen in run 2, in run 3 what had 20M "
    "tokens, low rank to 4 and KVpop, and in run 8 what had 60M; all else was beside other "
    "work on it."
)
SWEEP = (
    "Each is the first one with one setting changed, to a nominal ratio of 4, and is compared with "
    "the first one of its own run. Unless lessons are "
    "what is changed, all of a run read the same ones, and few tokens of them, so that many "
    "settings can be tried: what more tokens would change is not in it. documents: before they are "
    "packed. Texts are three books; rates are "
    "those of the adapter and of the low-rank updates. A longer window keeps more of so short an "
    "answer, and has a larger peak. Divergence is measured on the model's own answers, and "
    "divergences of different peaks are not of one task."
)
SMOLLM2_TRAINING = "SmolLM2 read texts and retrieval problems beside its answers."
MIXED_TRAINING = (
    "texts and retrieval too: beside the answers pieces of three books, as long as a training "
    "sequence, and problems of retrieval with their solutions, no longer than that. Half of these "
    "hide a number in an essay, half trace variables."
)
OTHERS = (
    "Percent, with the peak of live tokens in brackets; greedy, chat template, at most 1,024 new "
    "tokens. RULER's needles: niah_single_1 and niah_single_2 at so many tokens. "
    "They are asked in plain text, with RULER's own longest answers. Methods without training hold "
    "what the retrofit of the verdict held, task by task."
)
RULER = (
    "RULER's others are the mean of these tasks. Percent of each, greedily; single to multiquery "
    "are its needles, vt traces variables, cwe and fwe count words. Its two tasks of questions "
    "need files that are not shipped. The mean is over all problems, its differences paired by "
    "problem."
)
WORDINGS = (
    "worded alike: multikey_1, multikey_2 and vt ask in the words of the problems of retrieval "
    "among the lessons, which hide one number in an essay, or trace five variables, without the "
    "solved example that vt shows first. other needles: single_3, multikey_3, multivalue and "
    "multiquery have needles worded so, but long hexadecimal values, or ask for several at once. "
    "unlike: cwe and fwe. both: of these two kinds. Lessons have other needles, keys and values, "
    "and are shorter; words of keys come from the same lists. Essays of these tests, with which "
    "single_3, multikey_1, multivalue and multiquery are filled, are the last sixteenth of two of "
    "the books, which lessons had whole up to run 9. Only DMS with texts and retrieval had such "
    "lessons here. Problems in brackets."
)
FRONTIER = (
    "Eight chains of each test problem, temperature 0.7; the vote of so many of them, as the mean "
    "over the disjoint groups. longest: most new tokens of an answer. reads and peak are of all "
    "chains of a problem. In the picture a line joins what no cheaper point reaches; the other "
    "points are faint."
)
SMOLLM2 = (
    "Percent, with the peak of live tokens in brackets; length-normalised likelihood for the "
    "four tasks with choices; needles: RULER's niah_single_1 and niah_single_2 at 2,048 tokens;"
    " text: wikitext-2's test text in windows of 2,048. Questions with choices are short, so "
    "that a window of 16 tokens is a good part of them: the measured ratio lies below the "
    "nominal one. The adapter is the [one that ships](../../../dms_jax/assets/"
    "smollm2-135m-instruct-dms/README.md). Methods without training hold what its line held, task "
    "by task; SnapKV and ExpectedAttention hold a whole prompt until their first cut, and Quest, "
    "KCache and float8 all of it. In the picture, too, ExpectedAttention therefore holds more "
    "than the others. The trainings read needles of the same wording, drawn with other "
    "seeds, and up to run 9 the whole of the two books whose last sixteenth fills the essays of "
    "niah_single_2."
)
SPEED = (
    "Keys and values are random, and DMS is played by draws with uneven heads; the scorers of "
    "KVzap and KVpop are not trained. Windows are of 256 tokens; SnapKV and ExpectedAttention cut "
    "every 256 steps, where they cut every 16 for the tables of accuracy, and ms a step is without "
    "cuts. KCache has its values in the host's memory, there on the device. reads a row: entries "
    "of keys and values read by a step, averaged over layers, heads and sequences. Peaks of "
    "accuracy tables are shorter than this context, and there weights are most of what a step "
    "reads."
)
