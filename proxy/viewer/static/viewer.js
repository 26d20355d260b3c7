// Keyboard and token details. Every page reads without this file.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  // Filters apply as soon as a choice is made; the button stays for text.
  const form = one("form[data-auto]");
  if (form) {
    all("select", form).forEach((select) => select.addEventListener("change", () => form.requestSubmit()));
    form.addEventListener("submit", () => all("input, select", form).forEach((field) => { if (!field.value) field.disabled = true; }));
    window.addEventListener("pageshow", () => all("input, select", form).forEach((field) => { field.disabled = false; }));
  }

  // Rows and turns: j, k, Enter.
  const rows = all("[data-row]");
  let row = -1;
  const chooseRow = (next) => {
    if (!rows.length) return;
    if (row >= 0) rows[row].classList.remove("current");
    row = Math.max(0, Math.min(rows.length - 1, next));
    rows[row].classList.add("current");
    rows[row].scrollIntoView({ block: rows[row].matches("tr") ? "nearest" : "start" });
  };

  // The timeline follows the conversation.
  const links = new Map(all("a[data-turn]").map((link) => [`turn-${link.dataset.turn}`, link.parentElement]));
  if (links.size && "IntersectionObserver" in window) {
    const seen = new Set();
    const watch = new IntersectionObserver((entries) => {
      entries.forEach((entry) => (entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id)));
      const first = [...links.keys()].find((id) => seen.has(id));
      links.forEach((item, id) => item.classList.toggle("here", id === first));
      const here = links.get(first);
      const pane = one(".timeline");
      if (here && (here.offsetTop < pane.scrollTop || here.offsetTop + here.offsetHeight > pane.scrollTop + pane.clientHeight)) {
        pane.scrollTop = here.offsetTop - pane.clientHeight / 3;
      }
    }, { rootMargin: "-56px 0px -55% 0px" });
    all("article.exchange").forEach((article) => watch.observe(article));
  }

  // Many turns: keep the current one in sight.
  const dot = one(".step .dot[aria-current]");
  if (dot) dot.parentElement.scrollLeft = dot.offsetLeft - dot.parentElement.offsetLeft - dot.parentElement.clientWidth / 2;

  // A live run: say when there is something new; never move the page by itself.
  const fresh = one("[data-fresh]");
  const state = document.body.dataset.live;
  if (state) {
    const timer = setInterval(async () => {
      if (document.hidden) return;
      try {
        const answer = await fetch("/state");
        if (answer.ok && (await answer.text()) !== state) {
          fresh.hidden = false;
          clearInterval(timer);
        }
      } catch {
        // The viewer was stopped; the page stays readable.
      }
    }, 3000);
    fresh.addEventListener("click", () => location.reload());
  }

  // Tokens: click, arrows, s.
  const tokens = all("[data-tokens] .t[data-n]");
  const panel = one("[data-token]");
  let token = -1;
  const bar = (share) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "meter");
    svg.setAttribute("viewBox", "0 0 100 8");
    svg.setAttribute("preserveAspectRatio", "none");
    [["track", 100], ["fill", Math.max(0.5, share * 100)]].forEach(([name, width]) => {
      const rect = document.createElementNS(space, "rect");
      rect.setAttribute("class", name);
      rect.setAttribute("width", String(width));
      rect.setAttribute("height", "8");
      svg.append(rect);
    });
    return svg;
  };
  const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  const showToken = (node) => {
    const logprob = Number(node.dataset.lp);
    const table = make("table", "plain");
    const facts = [["id", node.dataset.id], ["place", node.dataset.n], ["log-prob", logprob.toFixed(4)],
      ["probability", `${(Math.exp(logprob) * 100).toFixed(2)} %`], ["version", node.dataset.v === "0" ? "base" : node.dataset.v ? `v${node.dataset.v}` : "–"]];
    facts.forEach(([name, value]) => {
      const line = make("tr");
      const head = make("th", "", name);
      head.scope = "row";
      line.append(head, make("td", "num", value));
      table.append(line);
    });
    const tops = make("ol", "tops");
    JSON.parse(node.dataset.top || "[]").forEach(([id, text, lp, sampled]) => {
      const item = make("li", sampled ? "sampled" : "");
      item.title = `id ${id}, log-prob ${lp}`;
      item.append(make("code", "", visible(text)), bar(Math.exp(lp)), make("span", "num", `${(Math.exp(lp) * 100).toFixed(1)} %`));
      tops.append(item);
    });
    panel.replaceChildren(make("div", "glyph", visible(node.textContent)), table, tops);
    one("[data-empty]").hidden = true;
    one("[data-token-panel]").classList.add("open");
    one("[data-close]").hidden = false;
  };
  const chooseToken = (next) => {
    if (!tokens.length || !panel) return;
    if (token >= 0) tokens[token].classList.remove("chosen");
    token = Math.max(0, Math.min(tokens.length - 1, next));
    tokens[token].classList.add("chosen");
    tokens[token].scrollIntoView({ block: "nearest" });
    showToken(tokens[token]);
  };
  const closeToken = () => {
    const box = one("[data-token-panel]");
    if (box) box.classList.remove("open");
    if (token >= 0) tokens[token].classList.remove("chosen");
  };
  all("[data-close]").forEach((button) => button.addEventListener("click", closeToken));
  tokens.forEach((node, place) => node.addEventListener("click", () => chooseToken(place)));

  const help = one("#help");
  const helpButton = one("[data-help]");
  helpButton.hidden = false;
  helpButton.addEventListener("click", () => help.showModal());

  const follow = (key) => { const link = one(`a[data-key="${key}"]`); if (link) link.click(); };
  const keys = {
    j: () => chooseRow(row + 1),
    k: () => chooseRow(row - 1),
    n: () => follow("n"),
    p: () => follow("p"),
    r: () => { if (!fresh.hidden) location.reload(); },
    u: () => (one('a[data-key="u"]') ? follow("u") : follow("h")),
    s: () => {
      const next = tokens.findIndex((node, place) => place > token && Number(node.dataset.lp) < -1.5);
      if (next >= 0) chooseToken(next);
    },
    Escape: closeToken,
    ArrowRight: () => chooseToken(token + 1),
    ArrowLeft: () => chooseToken(token - 1),
    "/": () => { const search = one("[data-search]"); if (search) { search.focus(); search.select(); } else follow("h"); },
    "?": () => help.showModal(),
    Enter: () => { if (row >= 0) { const link = one("td.task a, a.seq, a.strong, a", rows[row]); if (link) link.click(); } },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.closest("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
    const act = keys[event.key];
    if (act && !(event.key.startsWith("Arrow") && !tokens.length)) { event.preventDefault(); act(); }
  });
})();
