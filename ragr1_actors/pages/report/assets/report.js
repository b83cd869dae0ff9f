"use strict";
// Draws every figure with the colours of the reader's theme, and again when the theme changes.
const scheme = matchMedia("(prefers-color-scheme: dark)");

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--fore") },
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--soft") },
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--fore") } },
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
  };
}

function draw() {
  for (const figure of document.querySelectorAll("figure")) {
    const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
    Plotly.react(figure.querySelector(".plot"), data, themed(layout), { displaylogo: false, responsive: true });
  }
}

scheme.addEventListener("change", draw);
draw();
