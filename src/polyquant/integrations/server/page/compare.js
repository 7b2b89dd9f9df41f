// Where the answers of two models part: by token ids if the models share a vocabulary, else by characters.

// The first position that differs: {index} in tokens, or {at} in characters; null while all of one equals the other.
function parting(a, b, shared) {
  if (shared) {
    const length = Math.min(a.tokens.length, b.tokens.length);
    for (let i = 0; i < length; i++) if (a.tokens[i].id !== b.tokens[i].id) return { index: i };
    const longer = a.tokens.length > b.tokens.length ? a : b;
    const shorter = longer === a ? b : a;
    return shorter.done && longer.tokens.length > length ? { index: length } : null;
  }
  const length = Math.min(a.text.length, b.text.length);
  for (let i = 0; i < length; i++) if (a.text[i] !== b.text[i]) return { at: i };
  const [longer, shorter] = a.text.length > b.text.length ? [a, b] : [b, a];
  return shorter.done && longer.text.length > length ? { at: length } : null;
}

// The text in three pieces: before the parting, the token there, and the rest.
function pieces(cell, parted) {
  if (!parted) return [cell.text, "", ""];
  let start = parted.at ?? 0;
  let end = start + 1;
  if (parted.at === undefined) {
    const lengths = cell.tokens.map((token) => token.text.length);
    start = lengths.slice(0, parted.index).reduce((sum, n) => sum + n, 0);
    end = start + (lengths[parted.index] || 0);
    for (let i = parted.index + 1; end === start && i < lengths.length; i++) end += lengths[i]; // part of a character
  }
  return [cell.text.slice(0, start), cell.text.slice(start, end), cell.text.slice(end)];
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return `${value < 9.95 ? value.toPrecision(2) : value.toFixed(0)} %`;
}

// The token that a model has chosen, with its probability there and that of the other model's token, if it is known.
function chosen(cell, other, index) {
  const token = cell.tokens[index];
  if (!token) return `${cell.model}: the end`;
  if (token.logprob === undefined) return `${cell.model}: “${token.shown}”`;
  const rival = other.tokens[index];
  const also = rival && token.top?.get(rival.text);
  const rest = also === undefined ? "" : `, “${rival.shown}” ${percent(also)}`;
  return `${cell.model}: “${token.shown}” ${percent(token.logprob)}${rest}`;
}

// One line about two answers.
function verdict(a, b, shared) {
  const parted = parting(a, b, shared);
  if (parted?.index !== undefined) {
    return `The answers part at token ${parted.index + 1}. ${chosen(a, b, parted.index)}; ${chosen(b, a, parted.index)}.`;
  }
  if (parted) return `The answers part at character ${parted.at + 1}. (The models have different vocabularies.)`;
  if (a.error || b.error) return "";
  const count = Math.min(a.tokens.length, b.tokens.length);
  if (!a.done || !b.done) return count ? `The first ${count} tokens are equal.` : "";
  return `The answers are identical: ${count} tokens.`;
}
