// The conversation as elements. A cell is the answer of one model to one message.

const byId = (id) => document.getElementById(id);

function statistics(cell) {
  const parts = [];
  if (cell.tokens.length) parts.push(`${cell.tokens.length} tokens`);
  if (cell.rate) parts.push(`${cell.rate.toFixed(1)} tokens/s`);
  if (cell.first !== null) parts.push(`first token after ${cell.first.toFixed(2)} s`);
  if (cell.usage) parts.push(`prompt ${cell.usage.prompt_tokens} tokens, ${cell.usage.prompt_tokens_details.cached_tokens} cached`);
  if (cell.stopped) parts.push("stopped");
  else if (cell.finish === "length") parts.push("ended by the token limit");
  return parts.join(" · ");
}

class CellView {
  constructor(cell, several) {
    this.cell = cell;
    this.text = element("div", { className: "text" });
    this.stats = element("p", { className: "soft" });
    this.error = element("p", { className: "error" });
    this.error.setAttribute("role", "alert");
    this.copy = element("button", { type: "button", textContent: "Copy" });
    this.copy.setAttribute("aria-label", `Copy the answer of ${cell.model}`);
    this.copy.addEventListener("click", () => this.copied());
    this.node = element("section", { className: "answer" });
    this.node.setAttribute("aria-label", `Answer of ${cell.model}`);
    if (several) this.node.append(element("h3", { textContent: cell.model }));
    this.node.append(this.text, this.error, element("div", { className: "below" }, this.stats, this.copy));
  }

  async copied() {
    await navigator.clipboard.writeText(this.cell.text);
    this.copy.textContent = "Copied";
    setTimeout(() => { this.copy.textContent = "Copy"; }, 1500);
  }

  // other: the first cell of the turn, to compare with; null for the only one
  draw(formatted, parted) {
    const { cell } = this;
    this.node.setAttribute("aria-busy", String(!cell.done));
    this.text.classList.toggle("plain", !formatted);
    if (formatted) {
      this.text.replaceChildren(markdown(cell.text));
    } else {
      const [before, token, rest] = pieces(cell, parted);
      this.text.replaceChildren(before);
      if (token) this.text.append(element("mark", { textContent: token }));
      if (rest) this.text.append(element("span", { className: "rest", textContent: rest }));
    }
    this.error.textContent = cell.error ?? "";
    this.error.hidden = !cell.error;
    this.stats.textContent = statistics(cell);
    this.copy.hidden = !cell.done || !cell.text;
  }
}

class TurnView {
  constructor(turn, number, regenerate) {
    this.turn = turn;
    const several = turn.cells.length > 1;
    this.cells = turn.cells.map((cell) => new CellView(cell, several));
    this.notes = turn.cells.slice(1).map(() => element("p", { className: "note" }));
    this.again = element("button", { type: "button", textContent: "Regenerate" });
    this.again.addEventListener("click", regenerate);
    this.node = element(
      "article", { className: several ? "turn several" : "turn" },
      element("h2", { className: "unseen", textContent: `Message ${number}` }),
      element("div", { className: "user", textContent: turn.user }),
      element("div", { className: "answers" }, ...this.cells.map((view) => view.node)),
      ...this.notes, element("div", { className: "tools" }, this.again),
    );
  }

  // shared: whether two models have the same vocabulary; last: offer to regenerate
  draw({ formatted, shared, last, running }) {
    const [first, ...others] = this.turn.cells;
    const parted = others.map((cell) => parting(first, cell, shared(first.model, cell.model)));
    this.cells[0].draw(formatted && !others.length, parted[0]);
    others.forEach((cell, i) => {
      this.cells[i + 1].draw(false, parted[i]);
      this.notes[i].textContent = verdict(first, cell, shared(first.model, cell.model));
    });
    this.again.hidden = !last || running;
  }
}
