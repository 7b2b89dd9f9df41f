// A small part of Markdown as elements: code, headings, lists, quotes, bold and italic. Text of a model only becomes
// text nodes, never markup, and links stay text.

function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// The lengths are bounded, so that the time stays linear in the text.
const SPAN = /(`{1,2})([^`\n]{1,400})\1|\*\*(?=\S)([^\n]{1,400}?)(?<=\S)\*\*|\*(?=[^\s*])([^*\n]{1,400}?)(?<=\S)\*/g;

function spans(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(SPAN)) {
    nodes.push(text.slice(end, match.index));
    const [, , code, bold, italic] = match;
    if (code !== undefined) nodes.push(element("code", {}, code.trim() || code));
    else if (bold !== undefined) nodes.push(element("strong", {}, bold));
    else nodes.push(element("em", {}, italic));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

const KINDS = [
  ["heading", /^#{1,6}\s+(.*)/],
  ["ul", /^\s{0,8}[-*+]\s+(.*)/],
  ["ol", /^\s{0,8}\d{1,9}[.)]\s+(.*)/],
  ["blockquote", /^>\s?(.*)/],
];

function kind(line) {
  for (const [name, pattern] of KINDS) {
    const match = pattern.exec(line);
    if (match) return [name, match[1]];
  }
  return ["p", line];
}

function markdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  let open = null; // the block that the next line may continue
  for (let i = 0; i < lines.length; i++) {
    const fence = /^\s{0,3}```[^`]*$/.test(lines[i]);
    if (fence) {
      let end = i + 1;
      while (end < lines.length && !/^\s{0,3}```\s*$/.test(lines[end])) end++;
      out.append(element("pre", { tabIndex: 0 }, element("code", {}, lines.slice(i + 1, end).join("\n"))));
      i = end;
      open = null;
      continue;
    }
    if (!lines[i].trim()) {
      open = null;
      continue;
    }
    const [name, content] = kind(lines[i]);
    if (name === "heading") {
      out.append(element("p", { className: "heading" }, ...spans(content)));
      open = null;
    } else if (name === "ul" || name === "ol") {
      if (open?.name !== name) {
        const list = element(name, {});
        if (name === "ol") list.start = parseInt(lines[i], 10) || 1;
        out.append(list);
        open = { name, list };
      }
      open.node = element("li", {}, ...spans(content));
      open.list.append(open.node);
    } else if (name === "p" && open) {
      open.node.append("\n", ...spans(content)); // a paragraph or an item goes on
    } else {
      const node = element("p", {}, ...spans(content));
      if (name !== "blockquote") out.append(node);
      else if (open?.name === name) open.quote.append(node);
      else out.append(element("blockquote", {}, node));
      open = { name, node, quote: node.parentNode };
    }
  }
  return out;
}
