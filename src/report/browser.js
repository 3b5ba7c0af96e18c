
// Lists and filters the stored trajectories, and shows the tokens of one. Text is only put into text nodes.
const startBrowser = () => {
  const source = document.getElementById("trajectories"), place = document.getElementById("browser");
  if (!source || !place) return null;
  const form = place.querySelector("form"), list = document.getElementById("list"), more = document.getElementById("more");
  const reader = document.getElementById("reader"), found = document.getElementById("found");
  const PAGE = 100;
  const columns = [...place.querySelectorAll("thead th")].map(cell => cell.textContent);
  let data = null, hits = [], shown = 0, open = null;

  const node = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const fill = (name, entries) => {
    const select = form.elements[name], kept = select.value;
    select.replaceChildren(...entries.map(([value, text]) => { const option = node("option", text); option.value = value; return option; }));
    if (entries.some(([value]) => value === kept)) select.value = kept;
  };

  const load = text => {
    data = JSON.parse(text);
    data.special = new Set(data.special);
    findChanges();
    fill("run", [["", "all"], ...data.runs.map((run, i) => [String(i), run])]);
    fill("phase", [["", "training and evaluation"], ...data.phases.map((phase, i) => [String(i), phase])
      .filter(([i]) => data.rows.some(row => row.h === Number(i)))]);
    fill("outcome", [["", "all"], ...data.outcomes.map((outcome, i) => [String(i), outcome])]);
    form.elements.run.parentElement.hidden = data.runs.length < 2;
    filter();
  };

  // The mean reward of each problem at each step, by run, phase and problem. Sets each row's `change`: the problem's mean
  // reward at its last step minus that at its first.
  let means = new Map();
  const meansOf = row => means.get(`${row.r} ${row.h} ${row.q}`);
  const findChanges = () => {
    means = new Map();
    for (const row of data.rows) {
      const key = `${row.r} ${row.h} ${row.q}`, steps = means.get(key) ?? new Map();
      const [sum, count] = steps.get(row.t) ?? [0, 0];
      means.set(key, steps.set(row.t, [sum + row.reward, count + 1]));
    }
    for (const [key, steps] of means) {
      means.set(key, [...steps].map(([step, [sum, count]]) => [step, sum / count]).sort(([a], [b]) => a - b));
    }
    for (const row of data.rows) {
      const steps = meansOf(row);
      row.change = steps.length > 1 ? steps.at(-1)[1] - steps[0][1] : undefined;
    }
  };

  // The text of a trajectory in lower case, decoded once.
  const textOf = row => {
    if (row.text === undefined) {
      const parts = (row.m ?? []).map(([, content]) => content);
      const ids = row.k === undefined ? [] : bytes(row.k);
      for (let i = 0; i < ids.length; i += 3) parts.push(data.vocabulary[ids[i] | ids[i + 1] << 8 | ids[i + 2] << 16]);
      row.text = parts.join("").toLowerCase();
    }
    return row.text;
  };

  const ORDERS = {
    "reward-down": row => -row.reward, "reward-up": row => row.reward,
    "length-down": row => -row.n, "length-up": row => row.n,
    "change-down": row => -(row.change ?? -Infinity), "change-up": row => row.change ?? Infinity,
  };

  const filter = () => {
    const value = name => form.elements[name].value;
    // Offers only the steps of the chosen run and phase.
    const [run, phase] = ["run", "phase"].map(value);
    const here = row => (run === "" || row.r === Number(run)) && (phase === "" || row.h === Number(phase));
    const steps = [...new Set(data.rows.filter(here).map(row => row.t))].sort((a, b) => a - b);
    fill("step", [["", "all"], ...steps.map(step => [String(step), String(step)])]);
    const same = { r: value("run"), h: value("phase"), t: value("step"), o: value("outcome"), success: value("success") };
    const wanted = Object.entries(same).filter(([, text]) => text !== "").map(([key, text]) => [key, JSON.parse(text)]);
    const low = value("low") === "" ? -Infinity : Number(value("low")), high = value("high") === "" ? Infinity : Number(value("high"));
    const problem = value("problem").trim().toLowerCase(), text = value("text").toLowerCase();
    hits = data.rows.filter(row => row.reward >= low && row.reward <= high && wanted.every(([key, text]) => row[key] === text)
      && (problem === "" || data.problems[row.q][0].toLowerCase().includes(problem)) && (text === "" || textOf(row).includes(text)));
    const rank = ORDERS[value("order")];
    // The trajectories of a problem stay together.
    const places = value("order").startsWith("change") ? ["r", "h", "q", "t"] : [];
    const later = (a, b) => places.map(key => a[key] - b[key]).find(step => step !== 0);
    if (rank) hits.sort((a, b) => rank(a) - rank(b) || later(a, b) || 0);
    found.textContent = `${hits.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")} trajectories`;
    list.replaceChildren();
    shown = 0;
    extend();
  };

  // The reward and, after it, the rewards with a name.
  const rewards = row => {
    const named = Object.entries(row.w ?? {}).map(([name, value]) => `${name} ${show(value)}`);
    return show(row.reward) + (named.length ? ` (${named.join(", ")})` : "");
  };

  const extend = () => {
    const next = hits.slice(shown, shown + PAGE);
    list.append(...next.map(row => {
      const [problem, answer] = data.problems[row.q];
      const line = node("tr");
      line.tabIndex = 0;
      line.setAttribute("aria-selected", String(row === open));
      line.append(node("td", row.success ? "✓ right" : "✗ wrong", row.success ? "good" : "bad"),
        node("td", data.runs.length > 1 ? `${data.runs[row.r]}: ${data.phases[row.h]}` : data.phases[row.h]),
        ...[row.t, row.p, row.s, rewards(row), row.change === undefined ? "–" : (row.change > 0 ? "+" : "") + show(row.change)]
          .map(text => node("td", text, "n")), node("td", data.outcomes[row.o]),
        node("td", row.n, "n"), node("td", problem, "path"), node("td", answer ?? "–", "path"));
      [...line.children].forEach((cell, i) => { cell.dataset.name = columns[i]; });
      line.addEventListener("click", () => read(row, line));
      line.addEventListener("keydown", event => { if (event.key === "Enter") read(row, line); });
      return line;
    }));
    shown += next.length;
    more.hidden = shown >= hits.length;
  };

  const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const signed = text => new Int8Array(bytes(text).buffer);

  // The values at which the colours are darkest.
  const LOG_PROB_END = -6, ADVANTAGE_END = 2;
  const mismatchSize = byte => data.mismatch_min * 10 ** ((Math.abs(byte) - 1) / data.mismatch_steps);

  // One entry per sampled token: the text to show, and the weight of its colour in [0, 1].
  const figures = (row, kind) => {
    if (kind === "logprob") {
      return Array.from(bytes(row.l), byte => {
        const value = data.log_prob_min * (byte / 255) ** 2;
        return [`log-prob ≈ ${show(value)}`, value / LOG_PROB_END, "low"];
      });
    }
    if (kind === "advantage" && row.a !== undefined) {
      const of = value => [`advantage ${show(value)}`, Math.abs(value) / ADVANTAGE_END, value < 0 ? "down" : "up"];
      return row.b === undefined ? Array(row.n).fill(of(row.a)) : Array.from(signed(row.b), byte => of(row.a * byte / 127));
    }
    if (kind === "mismatch" && row.g !== undefined) {
      const of = byte => {
        const size = byte === 0 ? 0 : mismatchSize(byte);
        return [byte === 0 ? "mismatch 0: same bits" : `mismatch ≈ ${show(Math.sign(byte) * size)}`, Math.abs(byte) / 127, byte < 0 ? "down" : "up"];
      };
      return row.g === "" ? Array(row.n).fill(of(0)) : Array.from(signed(row.g), of);
    }
    return null;
  };

  // The colour scale of `kind`, with the values at its ends.
  const scale = kind => {
    const bar = tone => node("i", "", tone), made = node("p", undefined, "note scale");
    const end = Math.round(mismatchSize(127)), least = show(mismatchSize(1));
    made.append(...{
      logprob: ["log-prob 0", bar("low"), `${LOG_PROB_END} or less`],
      advantage: [`advantage -${ADVANTAGE_END} or less`, bar("down"), "0", bar("up"), `${ADVANTAGE_END} or more`],
      mismatch: [`mismatch -${end}`, bar("down"), `-${least} · 0 · ${least}`, bar("up"), `${end} nats, all decades have the same width`],
    }[kind]);
    return made;
  };

  const read = (row, line) => {
    open = row;
    for (const other of list.children) other.setAttribute("aria-selected", String(other === line));
    const [problem, answer] = data.problems[row.q];
    const kind = form.elements.colour.value, of = kind ? figures(row, kind) : null;
    const head = node("p");
    head.append(node("b", `${data.runs[row.r]}: ${data.phases[row.h]}, step ${row.t}, prompt ${row.p}, sample ${row.s}`), " ",
      node("span", row.success ? "✓ right" : "✗ wrong", row.success ? "good" : "bad"), " ", node("code", data.outcomes[row.o]));
    const about = node("p", `${problem} · reward ${rewards(row)} · right answer ${answer ?? "not recorded"}`, "note");
    const text = node("pre");
    if (row.k === undefined) {
      text.append(...(row.m ?? []).map(([role, content]) => `${role}: ${content}\n\n`));
      about.append(" · the run's checkpoints have no tokenizer.json, so messages are shown without colours");
    } else {
      const ids = bytes(row.k);
      let nth = 0, turn = 0;
      for (let i = 0; i * 3 < ids.length; i++) {
        while (turn < row.turns.length && i >= row.turns[turn][1]) turn++;
        const sampled = turn < row.turns.length && i >= row.turns[turn][0];
        const id = ids[3 * i] | ids[3 * i + 1] << 8 | ids[3 * i + 2] << 16;
        const token = node("span", data.vocabulary[id], `token ${sampled ? "sampled" : "given"}${data.special.has(id) ? " special" : ""}`);
        if (sampled) {
          const figure = of?.[nth++];
          if (figure) {
            token.title = figure[0];
            token.classList.add(figure[2]);
            token.style.setProperty("--weight", String(Math.min(1, Math.max(0, figure[1])).toFixed(2)));
          }
        }
        text.append(token);
      }
      if (kind && !of) about.append(` · the ${kind} of this trajectory was not recorded`);
      if (kind === "mismatch" && row.g === "") about.append(" · the mismatch is exactly 0 at every sampled token: same bits");
      about.append(" · grey: not sampled; point at a token to see its value");
    }
    const course = node("p", undefined, "note"), follow = node("button", "only this problem");
    follow.type = "button";
    follow.addEventListener("click", () => {
      form.elements.problem.value = problem;
      form.elements.order.value = "";
      filter();
    });
    course.append(`mean reward of this problem in ${data.phases[row.h]}, by step: `,
      meansOf(row).map(([step, mean]) => `${step}: ${show(mean)}`).join(" · "), " ", follow);
    reader.replaceChildren(head, about, course, ...(of && row.k !== undefined ? [scale(kind)] : []), text);
    reader.hidden = false;
  };

  let pause;
  form.addEventListener("input", event => {
    if (event.target.type === "search") {
      clearTimeout(pause);
      pause = setTimeout(filter, 200);
      return;
    }
    if (event.target.name !== "colour") return filter();
    if (open) read(open, [...list.children].find(line => line.getAttribute("aria-selected") === "true"));
  });
  form.addEventListener("submit", event => event.preventDefault());
  more.addEventListener("click", extend);
  place.hidden = false;
  load(source.textContent);
  return load;
};
const loadBrowser = startBrowser();
