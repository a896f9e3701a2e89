// Applies the chosen colours before the first paint, hence no module: those run later.
(() => {
  const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };
  const ORDER = Object.keys(NAMES);

  function stored() {
    try {
      const name = localStorage.getItem("omlx-theme");
      return name in NAMES ? name : "auto";
    } catch {
      return "auto"; // storage is switched off in this browser
    }
  }

  function apply(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }

  apply(stored());

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    let current = stored();

    function show() {
      button.querySelector("span").textContent = NAMES[current];
      button.setAttribute("aria-label", `Colours: ${NAMES[current]}`);
      button.title = "Colours: auto, light or dark";
    }

    button.addEventListener("click", () => {
      current = ORDER[(ORDER.indexOf(current) + 1) % ORDER.length];
      try {
        localStorage.setItem("omlx-theme", current);
      } catch {
        // it holds until the page is left
      }
      apply(current);
      show();
      document.dispatchEvent(new Event("omlx:theme"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      document.dispatchEvent(new Event("omlx:theme")),
    );
    show();
    button.hidden = false;
  });
})();
