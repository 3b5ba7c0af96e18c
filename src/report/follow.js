
// A served page asks its server whether the runs continued, and shows what is new. It keeps what the user is reading.
if ("served" in document.documentElement.dataset) {
  let state = null;
  const news = async () => {
    const [now, ...stages] = (await (await fetch("state", { cache: "no-store" })).text()).split("\n");
    if (state !== null && now !== state) {
      const answer = await fetch("./", { cache: "no-store" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const browser = fresh.getElementById("trajectories");
      if (!loadBrowser && browser) return location.reload();
      charts = JSON.parse(fresh.getElementById("data").textContent);
      const open = [...document.querySelectorAll("main > section:not([data-kept]) details")].map(part => part.open);
      for (const old of document.querySelectorAll("main > section:not([data-kept])")) old.remove();
      const kept = document.querySelector("main > section[data-kept]");
      let after = kept === null;
      for (const part of [...fresh.querySelectorAll("main > section")]) {
        if ("kept" in part.dataset) { after = true; continue; }
        if (after) document.querySelector("main").append(part); else kept.before(part);
      }
      document.querySelectorAll("main > section:not([data-kept]) details").forEach((part, i) => { part.open = open[i] ?? part.open; });
      document.querySelector("nav").replaceChildren(...fresh.querySelector("nav").children);
      if (browser) loadBrowser(browser.textContent);
      startCharts();
      hideRuns();
    }
    state = now;
    const place = document.getElementById("under-way");
    place.textContent = stages.join("\n");
    place.hidden = place.textContent === "";
  };
  setInterval(() => news().catch(() => {}), 2000);
}
