"""A self-contained HTML page that shows which heads evicted which tokens."""

import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.7 Georgia, serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }}
h1 {{ font-size: 1.3rem; }} p.note, table, select {{ font: 13px/1.5 system-ui, sans-serif; }}
#text span {{ border-radius: 2px; white-space: pre-wrap; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ padding: .25rem .6rem; text-align: right; }}
td.cell {{ cursor: pointer; }} td.chosen {{ outline: 2px solid #222; }}
</style></head><body>
<h1>{title}</h1>
<p class="note">{note}</p>
<table id="heads"></table>
<p class="note" id="legend"></p>
<div id="text"></div>
<script>
const tokens = {tokens}, evicted = {evicted}, window_ = {window};
// evicted[layer][head] is a string of 0 and 1, one digit a token
const layers = evicted.length, heads = evicted[0].length;
const far = Math.max(tokens.length - window_ - 1, 0);
function share(bits) {{ let n = 0; for (let i = 0; i < far; i++) n += +bits[i];
  return far ? n / far : 0; }}
function colour(x) {{ return `rgba(203, 67, 53, ${{(0.85 * x).toFixed(3)}})`; }}
let chosen = null;
function drawTable() {{
  let out = '<tr><th></th>' + [...Array(heads).keys()].map(h => `<th>head ${{h}}</th>`).join('') +
            '</tr>';
  for (let l = 0; l < layers; l++) {{
    out += `<tr><th>layer ${{l}}</th>`;
    for (let h = 0; h < heads; h++) {{
      const x = share(evicted[l][h]);
      const on = chosen && chosen[0] == l && chosen[1] == h ? ' chosen' : '';
      out += `<td class="cell${{on}}" data-l="${{l}}" data-h="${{h}}"` +
             ` style="background:${{colour(x)}}">${{Math.round(100 * x)}}%</td>`;
    }}
    out += '</tr>';
  }}
  const table = document.getElementById('heads');
  table.innerHTML = out;
  table.querySelectorAll('td').forEach(td => td.onclick = () => {{
    const next = [+td.dataset.l, +td.dataset.h];
    chosen = chosen && chosen[0] == next[0] && chosen[1] == next[1] ? null : next;
    draw(); }});
}}
function draw() {{
  drawTable();
  const root = document.getElementById('text');
  root.replaceChildren();
  tokens.forEach((token, i) => {{
    let x = 0;
    if (chosen) x = +evicted[chosen[0]][chosen[1]][i];
    else {{ for (const layer of evicted) for (const bits of layer) x += +bits[i];
           x /= layers * heads; }}
    const span = document.createElement('span');
    span.textContent = token;
    if (i < far) span.style.background = colour(x);
    span.title = `token ${{i}}: ` + (i < far ? (chosen ? (x ? 'evicted' : 'kept')
      : `evicted by ${{Math.round(100 * x)}}% of the heads`) : 'still in the window');
    root.append(span);
  }});
  document.getElementById('legend').textContent = chosen
    ? `Layer ${{chosen[0]}}, head ${{chosen[1]}}: red tokens were evicted. ` +
      `Click the cell again for all heads.`
    : 'All heads: the redder a token, the more heads evicted it. Click a cell for one head.';
}}
draw();
</script></body></html>
"""


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token adds, spaces included; joined they give the whole text.

    A single token may decode without its space, or to a part of a character. So the text of all
    tokens so far is compared with the text of one token more.
    """
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        after = tokenizer.decode(list(tokens[:end]), skip_special_tokens=True).rstrip("\ufffd")
        texts.append(after[len(before) :])
        before = after
    return texts


def eviction_page(
    tokens: Sequence[str],
    evicted: Bool[np.ndarray, "L K T"],
    *,
    window: int,
    title: str,
    note: str,
) -> str:
    """Returns an HTML page of a text in which evicted tokens are shaded.

    Args:
      tokens: text of each token, from `token_texts`.
      evicted: which keys each head evicted, from `evictions`.
      window: the last tokens, which are shown as still in the window.
      title: heading.
      note: a sentence below it.
    """
    bits = [["".join("01"[bit] for bit in head) for head in layer] for layer in evicted.tolist()]
    # "</" would end the script element from within a string.
    data = json.dumps(list(tokens), ensure_ascii=False).replace("</", "<\\/")
    return _TEMPLATE.format(
        title=html.escape(title),
        note=html.escape(note),
        tokens=data,
        evicted=json.dumps(bits),
        window=int(window),
    )
