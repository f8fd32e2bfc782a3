// Reads texts from standard input, and writes what the page's Markdown makes of them: `node markdown.mjs page.html`.
// The document is a small one of our own: nodes in linked lists, which can be serialised and knows no HTML.
import {readFileSync} from "node:fs";

class Node {
  parentNode = null; nextSibling = null; previousSibling = null; firstChild = null; lastChild = null; n = 0;

  get childNodes() { return {length: this.n}; }

  remove() {
    const {parentNode: parent, nextSibling: next, previousSibling: previous} = this;
    if (!parent) return;
    if (previous) previous.nextSibling = next; else parent.firstChild = next;
    if (next) next.previousSibling = previous; else parent.lastChild = previous;
    parent.n--;
    this.parentNode = this.nextSibling = this.previousSibling = null;
  }

  put(node, next) {
    if (typeof node === "string") node = new Text(node);
    if (node.tagName === "FRAGMENT") {
      while (node.firstChild) this.put(node.firstChild, next);
      return;
    }
    node.remove();
    const previous = next ? next.previousSibling : this.lastChild;
    Object.assign(node, {parentNode: this, nextSibling: next, previousSibling: previous});
    if (previous) previous.nextSibling = node; else this.firstChild = node;
    if (next) next.previousSibling = node; else this.lastChild = node;
    this.n++;
  }

  append(...nodes) { for (const node of nodes) this.put(node, null); }
  after(...nodes) { const next = this.nextSibling; for (const node of nodes) this.parentNode.put(node, next); }
}

class Text extends Node {
  constructor(data) { super(); this.data = data; }
}

class Element extends Node {
  dataset = {};
  classes = new Set();
  classList = {add: name => this.classes.add(name)};

  constructor(name) { super(); this.tagName = name.toUpperCase(); }
  set className(names) { for (const name of names.split(" ").filter(Boolean)) this.classes.add(name); }
  set textContent(text) { while (this.firstChild) this.lastChild.remove(); this.append(text); }
}

const document = {
  createElement: name => new Element(name),
  createTextNode: data => new Text(data),
  createDocumentFragment: () => new Element("fragment"),
};

const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

function html(node) {
  if (node instanceof Text) return escaped(node.data);
  const name = node.tagName.toLowerCase();
  const attributes = ["href", "rel", "start"].filter(key => key in node).map(key => ` ${key}="${escaped(String(node[key]))}"`);
  if (node.classes.size) attributes.push(` class="${[...node.classes].join(" ")}"`);
  let inner = "";
  for (let child = node.firstChild; child; child = child.nextSibling) inner += html(child);
  return ["br", "hr"].includes(name) ? `<${name}>` : `<${name}${attributes.join("")}>${inner}</${name}>`;
}

function depth(node) {
  let most = 0;
  for (let child = node.firstChild; child; child = child.nextSibling) most = Math.max(most, depth(child));
  return most + 1;
}

function shown(node) {
  if (node instanceof Text) return node.data;
  let inner = "";
  for (let child = node.firstChild; child; child = child.nextSibling) inner += shown(child);
  return inner;
}

const source = readFileSync(process.argv[2], "utf8");
const part = source.slice(source.indexOf("function make("), source.indexOf("// ---- what is kept ----"));
const {Markdown} = new Function("document", `"use strict";${part};return {Markdown};`)(document);

const results = JSON.parse(readFileSync(0, "utf8")).map(({text, size, fencesOnly, isTimed}) => {
  const root = new Element("div"), markdown = new Markdown(root, {fencesOnly}), start = process.cpuUsage();
  for (let i = 0; i < text.length; i += size) markdown.write(text.slice(i, i + size));
  markdown.end();
  const about = {seconds: process.cpuUsage(start).user / 1e6, depth: depth(root)};
  return isTimed ? {...about, n_shown: shown(root).length} : {...about, html: html(root), shown: shown(root)};
});
process.stdout.write(JSON.stringify(results));
