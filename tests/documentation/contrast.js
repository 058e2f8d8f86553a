// Pieces of visible text whose contrast to what is behind them is below the limit given, each with its colours.
const limit = arguments[0];
const parts = (colour) => {
  const canvas = (window.contrastCanvas ??= document.createElement("canvas").getContext("2d", { willReadFrequently: true }));
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
};
const over = (front, back) => front.slice(0, 3).map((value, k) => value * front[3] + back[k] * (1 - front[3]));
const light = (colour) => {
  const [red, green, blue] = colour.map((value) => {
    const share = value / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const behind = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
};
const found = new Map();
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode.textContent.trim(), element = walk.currentNode.parentElement;
  if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  const box = element.getBoundingClientRect();
  if (box.width < 2 || box.height < 2) continue;
  const style = getComputedStyle(element), back = behind(element);
  const ink = over(parts(element instanceof SVGElement ? style.fill : style.color), back);
  const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < limit) found.set(`${style.color} on ${back.map(Math.round)}`, `${ratio.toFixed(2)}: ${element.tagName}.${element.className} "${text.slice(0, 40)}"`);
}
return [...found].map(([colours, what]) => `${what} (${colours})`);
