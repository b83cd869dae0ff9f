// The page of `ragr1 view`. Text of a trajectory only ever becomes a text node: nothing here parses it as HTML.
"use strict";
const $ = (id) => document.getElementById(id);
const FIELDS = ["text", "stage", "first", "last", "task", "order"];
const LIMIT = 100;
const COLOURS = ["kind", "logprob", "version", "advantage", "ratio"];
const LEARNED = { advantage: "advantages", ratio: "ratios" }; // only of tokens that a learner trained on
const LEGENDS = { logprob: "model tokens: the stronger, the less likely (full at -4 nats)", version: "model tokens: the stronger, the newer the policy version",
  advantage: "model tokens: green above 0, red below (full at 2)", ratio: "model tokens, newest policy to the one that sampled: green above 1, red below (full at 1.2 and 1/1.2)" };
let run = null, rows = [], total = 0, chosen = -1, asked = 0, opened = 0, detail = null, colour = "kind", side = "one", timer = 0, lost = false;
let filter = { outcome: "all", order: "newest", offset: 0 };

function node(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const number = (value, digits = 2) => (value === null || value === undefined ? "-" : Number(value).toFixed(digits));

async function get(path, parameters = {}) {
  let answer, body;
  try {
    answer = await fetch(path + "?" + new URLSearchParams(parameters));
    body = await answer.json();
  } catch (error) { lost = true; throw new Error("the viewer does not answer: " + error.message); }
  if (!answer.ok) throw new Error(body.error);
  return body;
}
const say = (error) => { $("state").textContent = error.message; $("state").className = "bad"; };

// -- address: #t/FILE/ID opens a trajectory; the filters are in ?...
function address() {
  const given = Object.fromEntries(Object.entries(filter).filter(([name, value]) => value && !(name === "outcome" && value === "all") && !(name === "order" && value === "newest")));
  return location.pathname + (Object.keys(given).length ? "?" + new URLSearchParams(given) : "") + location.hash;
}
const link = (row) => "#t/" + encodeURIComponent(row.file) + "/" + encodeURIComponent(row.trajectory_id);
function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  filter = { outcome: given.outcome || "all", order: given.order || "newest", offset: Number(given.offset) || 0 };
  for (const name of FIELDS) { filter[name] = given[name] || (name === "order" ? "newest" : ""); $(name).value = filter[name]; }
}

// -- the list
async function refresh(keep = false) {
  const mine = ++asked;
  try {
    const started = performance.now();
    const found = await get("api/trajectories", { ...filter, limit: LIMIT });
    if (mine !== asked) return;
    const before = keep && rows[chosen] ? link(rows[chosen]) : null;
    rows = found.rows; total = found.num_rows;
    chosen = before ? rows.findIndex((row) => link(row) === before) : -1;
    showRows(); showOutcomes(found.counts);
    $("page").textContent = total ? `${filter.offset + 1}-${filter.offset + rows.length} of ${total.toLocaleString("en")}` : "none";
    $("previous").disabled = !filter.offset; $("next").disabled = filter.offset + rows.length >= total;
    history.replaceState(null, "", address());
    document.documentElement.dataset.ready = String(Math.round(performance.now() - started));
    showState();
  } catch (error) { if (mine === asked) say(error); }
}
function badges(row) {
  const made = [node("span", { class: "badge " + (row.is_correct ? "good" : "bad") }, row.is_failed ? "failed" : row.is_correct ? "correct" : "wrong")];
  if (row.is_truncated) made.push(node("span", { class: "badge" }, "truncated"));
  if (row.is_malformed) made.push(node("span", { class: "badge" }, "malformed"));
  if (row.is_correct && !row.has_searched) made.push(node("span", { class: "badge" }, "no search"));
  if (!row.is_correct && !row.is_failed && row.has_evidence) made.push(node("span", { class: "badge" }, "ignored evidence"));
  return made;
}
function showRows() {
  $("rows").replaceChildren(...rows.map((row, index) => node("li", { role: "option", id: "row" + index, "aria-selected": String(index === chosen), onclick: () => choose(index) },
    node("div", {}, row.question || row.trajectory_id),
    node("div", { class: "soft" }, ...badges(row), `${row.answer || "no answer"} · reward ${number(row.reward)} · ${row.num_calls} ${row.num_calls === 1 ? "call" : "calls"} · ${row.num_model_tokens} tokens · ${row.file}`))));
}
function showOutcomes(counts) {
  const focused = document.activeElement && document.activeElement.dataset.outcome;
  $("outcomes").replaceChildren(...Object.entries(run.outcomes).map(([name, meaning], index) => node("button", { "data-outcome": name, title: `${meaning} (${index + 1})`, "aria-pressed": String(filter.outcome === name), onclick: () => setOutcome(name) },
    `${name} ${counts[name].toLocaleString("en")}`)));
  if (focused) document.querySelector(`[data-outcome="${focused}"]`)?.focus();
}
function setOutcome(name) { filter.outcome = name; filter.offset = 0; refresh(); }
function turnPage(step) { const offset = filter.offset + step * LIMIT; if (offset >= 0 && offset < total) { filter.offset = offset; refresh(); } }
function choose(index) {
  if (!rows.length) return;
  chosen = Math.max(0, Math.min(rows.length - 1, index));
  [...$("rows").children].forEach((item, place) => item.setAttribute("aria-selected", String(place === chosen)));
  $("rows").setAttribute("aria-activedescendant", "row" + chosen);
  $("rows").children[chosen].scrollIntoView({ block: "nearest" });
  location.hash = link(rows[chosen]);
}

// -- one trajectory
async function open() {
  const [kind, file, id] = location.hash.slice(1).split("/").map(decodeURIComponent);
  if (kind !== "t" || id === undefined) return;
  const mine = ++opened;
  try {
    const found = await get("api/trajectory", { file, id });
    if (mine !== opened) return;
    detail = found; await showDetail();
  } catch (error) { if (mine === opened) { detail = null; $("detail").replaceChildren(node("p", { class: "bad" }, error.message)); } }
}
async function showDetail() {
  if (!detail) return;
  const { summary, task } = detail;
  const parts = [node("h2", { class: "question" }, task.question),
    node("p", {}, ...badges(summary), node("span", { class: "soft" }, `${summary.trajectory_id} · ${summary.file} · ${summary.stop_reason} · reward ${number(summary.reward, 3)}`)),
    node("p", {}, "answer: ", node("b", {}, detail.answer || "none"), " · golden: ", node("b", {}, task.golden_answers.join(" | ") || "unknown")),
    detail.error ? node("p", { class: "bad" }, detail.error) : null,
    node("p", {}, ...[["one", "this one"], ["siblings", "siblings side by side (s)"], ["task", "this task over iterations (t)"]].flatMap(([name, label]) =>
      [node("button", { "data-side": name, "aria-pressed": String(side === name), onclick: () => setSide(name) }, label), " "]))];
  const mine = opened;
  if (side === "siblings") parts.push(await siblings());
  else if (side === "task") parts.push(await overIterations());
  else parts.push(...oneTrajectory());
  if (mine === opened) $("detail").replaceChildren(...parts.filter(Boolean));
}
function setSide(name) { side = side === name ? "one" : name; showDetail().catch(say); }
function oneTrajectory() {
  const chooser = node("select", { id: "colour", "aria-label": "Colour of tokens" }, ...COLOURS.map((name) =>
    node("option", { value: name, selected: name === shown() ? "" : false, disabled: usable().includes(name) ? false : "" }, usable().includes(name) ? name : name + " (not learned from)")));
  chooser.addEventListener("change", () => { colour = chooser.value; showDetail().catch(say); });
  return [node("h2", {}, "Tokens, coloured by ", chooser), legend(), tokens(detail.tokens),
    usable().length < COLOURS.length ? node("p", { class: "soft" }, "No RL step trained on this trajectory, so it has no advantages or no ratios.") : null,
    node("h2", {}, "Turns"), ...detail.turns.map(turn),
    node("h2", {}, "Metrics"), node("table", {}, ...Object.entries(detail.metrics).map(([name, value]) => node("tr", {}, node("td", {}, name), node("td", {}, number(value, 4)))))];
}
function legend() {
  const { kind_names: names, is_text: isText } = detail.tokens;
  const parts = shown() === "kind" ? names.map((name) => node("span", { class: "kind-" + name }, name)) : [node("span", {}, LEGENDS[shown()])];
  return node("p", { class: "legend" }, ...parts, isText ? null : node("span", { class: "soft" }, "no tokenizer in the run yet: token ids are shown"));
}
const shown = () => (usable().includes(colour) ? colour : "kind");
const usable = () => COLOURS.filter((name) => !(name in LEARNED) || detail.tokens[LEARNED[name]]);
function shade(given, index, low, high) { // between -1, red, and 1, green or whatever is stronger
  const by = shown(), value = (given[LEARNED[by]] || [])[index];
  if (by === "logprob") return Math.max(-1, given.logprobs[index] / 4);
  if (by === "version") return -(high > low ? (given.policy_versions[index] - low) / (high - low) : 0.5);
  if (value === null || value === undefined) return 0;
  return Math.max(-1, Math.min(1, by === "advantage" ? value / 2 : Math.log(value) / Math.log(1.2)));
}
function tokens(given) {
  const box = node("div", { class: "tokens", tabindex: "0" });
  const versions = given.policy_versions.filter((version) => version >= 0);
  const low = versions.reduce((a, b) => Math.min(a, b), Infinity), high = versions.reduce((a, b) => Math.max(a, b), -Infinity);
  given.pieces.forEach((piece, index) => {
    if (index && given.row_starts.includes(index)) box.append(node("p", { class: "soft" }, `row ${given.row_starts.indexOf(index) + 1}: the conversation was rewritten`));
    const image = given.images.find((one) => index >= one.start && index < one.start + one.num_tokens);
    if (image && index > image.start) return;
    if (image) { box.append(node("img", { src: image.url, alt: `image, ${image.num_tokens} tokens from ${index} on`, title: `image, ${image.num_tokens} tokens from ${index} on` })); return; }
    const kind = given.kind_names[given.kinds[index]] || "unknown", isModel = kind === "model";
    const token = node("span", { title: `${kind}, token ${index}` + (isModel ? `, log-prob ${number(given.logprobs[index], 4)}, policy version ${given.policy_versions[index]}` +
      Object.entries(LEARNED).map(([name, key]) => (given[key] ? `, ${name} ${number(given[key][index], 4)}` : "")).join("") : "") }, given.is_text ? piece : piece + " ");
    if (shown() === "kind") token.className = "kind-" + kind;
    else if (isModel) {
      const strength = shade(given, index, low, high);
      token.style.backgroundColor = `rgba(var(--${strength > 0 ? "rise" : "heat"}), ${(0.75 * Math.abs(strength)).toFixed(3)})`;
    }
    box.append(token);
  });
  return box;
}
function turn(given, index) {
  return node("div", { class: "turn" }, node("p", { class: "soft" }, `turn ${index + 1}: ${given.action}, ${given.num_model_tokens} tokens${given.finish_reason === "length" ? ", cut at the limit" : ""}${given.reward ? `, reward ${number(given.reward)}` : ""}`), node("pre", {}, given.completion_text),
    ...given.calls.map((call) => node("details", { open: "" }, node("summary", {}, node("b", {}, call.asked),
      ` · ${call.tool} · ${number(call.latency_s * 1000, 0)} ms, waited ${number(call.waited_s * 1000, 0)} ms${call.is_cached ? " · from the cache" : ""} · ${call.records.length} documents`),
    ...(call.result ? [node("pre", {}, call.result)] : []),
    ...call.records.map((found) => node("div", { class: "doc" }, node("span", { class: found.gold ? "gold" : "soft" },
      `${number(found.score, 3)} · ${found.title} · ${found.id}${found.gold ? " · evidence" : ""}`), node("p", {}, found.text), found.image ? node("img", { src: found.image, alt: found.title }) : null)))));
}
async function siblings() {
  const all = await Promise.all(detail.siblings.map((row) => get("api/trajectory", { file: row.file, id: row.trajectory_id })));
  return node("div", {}, node("h2", {}, `attempts of this group: ${detail.siblings.length}`), node("div", { class: "sides" }, ...all.map((found, index) => {
    const row = detail.siblings[index];
    return node("div", { class: "side" + (row.trajectory_id === detail.summary.trajectory_id ? " this" : "") }, node("p", {}, node("a", { href: link(row) }, row.trajectory_id)),
      node("p", {}, ...badges(row)), node("p", { class: "soft" }, `reward ${number(row.reward)}, ${number(row.above_mean)} above the mean of the group${found.variant ? `, variant ${found.variant}` : ""}${found.parent ? `, a fork of ${found.parent}` : ""}`),
      ...found.turns.map((given) => node("div", { class: "turn" }, node("pre", {}, given.completion_text), ...given.calls.map((call) => node("p", { class: "soft" }, `${call.asked}: ${call.records.map((found) => found.title).join(", ")}`)))),
      node("p", {}, "answer: ", node("b", {}, found.answer || "none")));
  })));
}
async function overIterations() {
  const found = await get("api/trajectories", { task: detail.task.task_id, order: "oldest", limit: 500 });
  const files = new Map();
  for (const row of found.rows) files.set(row.file, [...(files.get(row.file) || []), row]);
  const line = ([file, members]) => node("tr", {}, node("td", {}, file), node("td", {}, `${members.filter((row) => row.is_correct).length} of ${members.length}`),
    node("td", {}, number(members.reduce((sum, row) => sum + row.reward, 0) / members.length)), node("td", {}, number(members.reduce((sum, row) => sum + row.num_calls, 0) / members.length, 1)),
    node("td", {}, ...members.flatMap((row) => [node("a", { href: link(row), class: row.is_correct ? "good" : "bad" }, row.answer || "none"), " "])));
  return node("div", {}, node("h2", {}, `${detail.task.task_id} over iterations`, found.num_rows > found.rows.length ? ` (the first ${found.rows.length} of ${found.num_rows})` : ""),
    node("table", { id: "over" }, node("tr", {}, ...["file", "correct", "mean reward", "calls", "answers"].map((name) => node("th", {}, name))), ...[...files].map(line)));
}

// -- the run, live
function showState() {
  const making = run.num_indexed < run.num_files - run.problems.length ? `, indexing: ${run.num_indexed} of ${run.num_files} files` : "";
  $("state").className = run.problems.length ? "bad" : "";
  $("state").textContent = `${run.num_trajectories.toLocaleString("en")} trajectories in ${run.num_indexed} files${making}` + (run.problems.length ? `; ${run.problems[0]}` : "") + (run.problems.length > 1 ? ` (and ${run.problems.length - 1} more)` : "");
}
async function look() {
  try {
    const found = await get("api/run");
    const changed = !run || run.version !== found.version, isBack = lost;
    run = found; lost = false;
    if (changed || isBack) {
      $("run").textContent = run.name; document.title = "ragr1 view " + run.name;
      const stage = filter.stage;
      $("stage").replaceChildren(node("option", { value: "" }, "every stage"), ...run.stages.map((name) => node("option", { value: name }, name)));
      $("stage").value = stage;
      await refresh(true);
      if (isBack && !detail) await open();
    }
  } catch (error) { say(error); }
  setTimeout(look, 2000);
}
function changed(event) {
  clearTimeout(timer);
  timer = setTimeout(() => { for (const name of FIELDS) filter[name] = $(name).value.trim(); filter.offset = 0; refresh(); }, event.type === "input" ? 150 : 0);
}
const KEYS = { j: () => choose(chosen + 1), k: () => choose(chosen - 1), ArrowDown: () => choose(chosen + 1), ArrowUp: () => choose(chosen - 1), n: () => turnPage(1), p: () => turnPage(-1),
  s: () => setSide("siblings"), t: () => setSide("task"), "/": () => $("text").focus(),
  c: () => { if (detail) { colour = usable()[(usable().indexOf(shown()) + 1) % usable().length]; showDetail().catch(say); } } };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key.startsWith("Arrow") && $("detail").contains(event.target)) return; // scrolls the trajectory
  const outcome = Object.keys(run ? run.outcomes : {})[Number(event.key) - 1];
  const act = outcome && event.key !== " " ? () => setOutcome(outcome) : KEYS[event.key];
  if (act && run) { event.preventDefault(); act(); }
});
for (const name of FIELDS) { $(name).addEventListener("input", changed); $(name).addEventListener("change", changed); }
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("previous").addEventListener("click", () => turnPage(-1));
$("next").addEventListener("click", () => turnPage(1));
window.addEventListener("hashchange", open);
readAddress();
look().then(open);
