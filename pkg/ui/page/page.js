// The page shows what /events sends, and asks /explain of a volume that is opened. All
// that is shown is put in as text. What did not change is left alone, so that the
// keyboard's place, what is open and what is selected stay while the nodes are read anew.
"use strict";

// The states, the worst first, with the sign that stands beside each word.
const states = [
	["failing", "✕"], ["refused", "⊘"], ["unseen", "?"], ["under way", "↻"], ["waiting", "…"], ["settled", "✓"],
];

const byId = (id) => document.getElementById(id);

// make returns an element; a value of undefined leaves an attribute out.
function make(tag, attributes, ...children) {
	const made = document.createElement(tag);
	for (const [name, value] of Object.entries(attributes || {})) {
		if (value !== undefined) made.setAttribute(name, value);
	}
	made.append(...children.filter((child) => child !== undefined && child !== null && child !== ""));
	return made;
}

// say sets the text of an element unless it has that: a change would be announced.
function say(element, text) {
	if (element.textContent !== text) element.textContent = text;
}

// contents are the values of which the children of elements were made.
const contents = new WeakMap();

// refill makes the children of an element of a value, unless they are of the same one.
function refill(element, value, build) {
	const text = JSON.stringify(value);
	if (contents.get(element) === text) return;
	contents.set(element, text);
	element.replaceChildren(...value.flatMap(build));
}

// arrange makes the children of an element these, in this order. What is in its place
// stays there, and what has the keyboard keeps it. What others make room for is not moved:
// it would lose what is selected in it, and the place of a screen reader.
function arrange(parent, children) {
	const focused = document.activeElement, wanted = new Set(children);
	for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
	children.forEach((child, i) => {
		const there = parent.childNodes[i];
		if (there === child) return;
		if (there && there.nextSibling === child) there.remove(); // its place comes later
		else parent.insertBefore(child, there || null);
	});
	if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

// Times

let clock = 0; // how far the server's clock is ahead of this one, in milliseconds

// span writes a time in one unit or two, such as 45s, 3m, 2h5m or 12d.
function span(milliseconds) {
	const seconds = Math.max(Math.floor(milliseconds / 1000), 0);
	const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
	if (minutes < 1) return `${seconds}s`;
	if (hours < 1) return `${minutes}m`;
	if (hours < 10 && minutes % 60) return `${hours}h${minutes % 60}m`;
	if (hours < 48) return `${hours}h`;
	return `${Math.floor(hours / 24)}d`;
}

function relative(at) {
	const past = Date.now() + clock - at;
	return past < -1000 ? `in ${span(-past)}` : past < 1000 ? "now" : `${span(past)} ago`;
}

// time returns an element that tells how long ago a moment is, and goes on to.
function time(text) {
	const at = Date.parse(text);
	return make("time", { datetime: text, title: new Date(at).toLocaleString() }, relative(at));
}

// moment returns an element that tells when something was: how long ago, and by the clock.
function moment(text) {
	const at = new Date(text), today = at.toDateString() === new Date().toDateString();
	const clock = at.toLocaleString([], { ...(today ? {} : { day: "numeric", month: "short" }), hour: "2-digit", minute: "2-digit" });
	return make("p", { class: "moment" }, time(text), ` · ${clock}`);
}

function tick() {
	for (const each of document.getElementsByTagName("time")) say(each, relative(Date.parse(each.dateTime)));
	say(byId("live-age"), view && view.at ? `· read ${relative(Date.parse(view.at))}` : "");
}

// Words

// coded returns a sentence in which what stands between backquotes is code.
function coded(sentence) {
	return sentence.split("`").map((words, i) => (i % 2 ? make("code", {}, words) : words));
}

// brief returns a text for where it must be short: without the volume's name in front, and
// of long paths the end. The whole is told of the part.
function brief(text, volume) {
	return text.replace(`volume ${volume}: `, "").replace(/(?:\/[^\s/:;,"'`()]+){5,}/g, (path) => `…/${path.split("/").pop()}`);
}

// stateOf is what a volume counts as: one that is as asked, and for which another call was
// refused, has somebody who waits for that.
const stateOf = (volume) => (volume.refused && volume.is === "settled") || !volume.is ? "refused" : volume.is;
const style = (state) => state.replace(" ", "-");
const nameOf = (part) => part.pod || part.part;
const podsOf = (volume) => [...new Set(volume.parts.map((part) => part.pod).filter(Boolean))];
const titleOf = (volume) => volume.claim || podsOf(volume)[0] || volume.volume;

function namespaceOf(volume) {
	const [namespace, rest] = (volume.claim || podsOf(volume)[0] || "").split("/");
	return rest === undefined ? "not known" : namespace;
}

function pill(state) {
	const sign = states.find(([name]) => name === state)[1];
	return make("span", { class: `pill ${style(state)}` }, make("span", { class: "sign", "aria-hidden": "true" }, sign), ` ${state}`);
}

function amount(value) {
	if (value.name.endsWith("_bytes")) {
		const units = ["B", "Ki", "Mi", "Gi", "Ti", "Pi"];
		let size = value.value, unit = 0;
		for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
		return `${+size.toFixed(1)}${units[unit]}`;
	}
	return value.name.endsWith("_ratio") ? `${Math.round(100 * value.value)}%` : String(value.value);
}

// Nodes

// manyNodes is how many nodes are shown above the volumes without being asked for. On a
// phone none are.
const manyNodes = 6;

// cards are the nodes that are shown, by name and pod.
const cards = new Map();

class Card {
	constructor() {
		this.head = make("h3");
		this.count = make("span", { class: "quiet small" });
		this.wrong = make("div");
		this.fills = make("div");
		this.told = make("div");
		this.list = make("dl");
		this.summary = make("summary", {}, "More");
		this.more = make("details", { class: "more" }, this.summary, this.told, this.list);
		this.element = make("li", { class: "node" }, make("div", { class: "between" }, this.head, this.count), this.wrong, this.fills, this.more);
	}

	update(node) {
		say(this.head, node.name);
		this.summary.setAttribute("aria-label", `More of ${node.name}`); // of many: each has a name of its own
		say(this.count, node.error ? "" : counted(node.volumes));
		this.element.classList.toggle("away", Boolean(node.error || node.wrong));
		const told = node.told || [], wrong = node.error ? [`This node could not be asked: ${node.error}`] : node.wrong ? told : [];
		refill(this.wrong, wrong, (text) => make("p", { class: "told" }, text));
		refill(this.fills, node.fills || [], (fill) => filled(fill, node.name));
		const more = [node.driver && `${node.driver} ${node.version || ""}`, node.pod && `Pod ${node.pod}`, ...(node.wrong ? [] : told)].filter(Boolean);
		refill(this.told, more, (text) => make("p", {}, text));
		this.more.hidden = more.length === 0;
		refill(this.list, (node.places || []).filter((place) => place.values), (place) => [ // a backend may have nothing to tell, as LVM without a group
			...place.values.map((value) => make("div", {},
				make("dt", {}, [place.backend, ...Object.values(value.labels || {})].join(" ") + ": ", value.help), make("dd", {}, amount(value)))),
			make("div", {}, make("dt", {}, `${place.backend}: measured`), make("dd", {}, time(place.seen))),
		]);
	}
}

// counted says how many volumes there are, and how many of them in a state that is not
// the usual one.
function counted(volumes) {
	if (volumes.length === 0) return "no volumes";
	const words = [volumes.length === 1 ? "1 volume" : `${volumes.length} volumes`];
	for (const [state] of states.slice(0, -1)) {
		const n = volumes.filter((volume) => stateOf(volume) === state).length;
		if (n) words.push(`${n} ${state}`);
	}
	return words.join(", ");
}

// fullness is how full a place is, in a word for which the page has a colour.
const fullness = (fill) => (fill.used >= 0.9 ? "full" : fill.used >= 0.75 ? "high" : "");

// troubleOf says what is wrong with nodes, for when they are not shown.
function troubleOf(nodes) {
	const away = nodes.filter((node) => node.error || node.wrong).length;
	const full = nodes.filter((node) => (node.fills || []).some((fill) => fullness(fill) === "full")).length;
	return [away && `${away} in trouble`, full && `${full} nearly full`].filter(Boolean).join(", ");
}

function filled(fill, node) {
	const used = Math.round(100 * fill.used);
	const level = make("span");
	level.style.width = `${used}%`;
	return make("div", { class: `fill ${fullness(fill)}` },
		make("div", { class: "between" }, make("span", {}, fill.name), make("span", { class: "quiet" }, `${used}% used`)),
		make("span", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": used, "aria-label": `${fill.name} of ${node}: used`, "aria-valuetext": `${used}% used; ${fill.text}` }, level),
		make("span", { class: "quiet" }, fill.text));
}

// Volumes

// rows are the volumes that are shown, by node and id.
const rows = new Map();

class Row {
	constructor() {
		this.summary = make("summary");
		this.parts = make("div");
		this.why = make("div", { "aria-live": "polite" });
		this.story = make("ol", { class: "story" });
		this.again = make("button", { type: "button", class: "again" }, "Look again");
		this.again.addEventListener("click", () => this.explain());
		this.body = make("div", { class: "body columns" },
			make("div", {}, make("h4", {}, "Parts"), this.parts),
			make("div", { class: "explained" }, make("h4", {}, "Explained"), this.why, this.again),
			make("div", {}, make("h4", {}, "Story"), this.story));
		this.details = make("details", {}, this.summary, this.body);
		this.details.addEventListener("toggle", () => {
			if (this.details.open) this.fill();
		});
		this.element = make("li", { class: "row" }, this.details);
	}

	update(node, volume) {
		const step = volume.step && { ...volume.step, ageNanoseconds: undefined };
		const now = JSON.stringify([node.name, { ...volume, step }]);
		this.node = node;
		this.volume = volume;
		if (step) for (const age of this.element.getElementsByClassName("running")) say(age, ageOf(volume.step));
		if (now === this.shown) return;
		this.shown = now;
		this.summarise();
		if (this.details.open) this.fill();
	}

	summarise() {
		const { node, volume } = this;
		const state = stateOf(volume), title = titleOf(volume), pods = podsOf(volume);
		const ids = title === volume.volume ? [] : [make("span", { class: "sub id" }, volume.volume)];
		const oldest = volume.parts.map((part) => part.since).filter((since) => Date.parse(since) > 0).sort()[0];
		this.again.setAttribute("aria-label", `Look again at ${title}`);
		this.summary.replaceChildren(
			pill(state),
			make("span", { class: ids.length ? "name" : "name id" }, title, ...ids),
			make("span", { class: "small" }, pods.filter((pod) => pod !== title).join(", "), make("span", { class: "sub" }, `on ${node.name}`)),
			make("span", { class: "age" }, oldest ? time(oldest) : ""),
			...[this.glance()].filter(Boolean).map((words) => make("span", { class: `glance ${style(state)}` }, ...words)));
	}

	// glance is what is wrong, in one sentence.
	glance() {
		const { volume } = this;
		const wrong = volume.parts.find((part) => part.is === "failing" && part.error) || volume.parts.find((part) => part.error);
		if (wrong) return coded(brief(wrong.error, volume.volume));
		if (volume.step) return running(volume.step);
		return volume.refused && coded(`Refused: ${brief(volume.refused.error, volume.volume)}`);
	}

	fill() {
		const { volume } = this;
		const parts = volume.parts.map((part) => this.part(part));
		const device = volume.device ? [make("p", { class: "asked" }, `Device: ${volume.device}${volume.holder ? `; held by ${volume.holder}` : ""}`)] : [];
		const step = volume.step ? [make("p", { class: "callout under-way" }, ...running(volume.step))] : [];
		const refused = volume.refused ? [make("p", { class: "callout refused" }, ...refusal(volume.refused))] : [];
		this.parts.replaceChildren(make("ul", {}, ...parts), ...device, ...step, ...refused);
		this.story.replaceChildren(...volume.story.map(({ at, text, is }) =>
			make("li", { class: is ? style(is) : undefined }, moment(at), ...coded(brief(text, volume.volume)))));
		const asks = JSON.stringify([volume.parts, volume.device, volume.holder, volume.step && volume.step.step, volume.refused && [volume.refused.call, volume.refused.error]]);
		if (asks !== this.asked) {
			this.asked = asks;
			this.explain();
		}
	}

	part(part) {
		const next = part.nextTry ? [make("p", { class: "asked" }, "Next try: ", time(part.nextTry))] : [];
		const lost = part.losses ? [make("p", { class: "asked" }, `Lost ${part.losses === 1 ? "once" : `${part.losses} times in a row`}, last `, time(part.lost))] : [];
		const error = part.error ? [make("p", { class: `callout ${style(part.is)}` }, ...coded(part.error))] : [];
		return make("li", { class: "part" },
			make("div", { class: "line" }, pill(part.is), make("strong", {}, nameOf(part)), Date.parse(part.since) > 0 ? make("span", { class: "age" }, time(part.since)) : ""),
			make("p", { class: "asked" }, `Asked: ${part.asked}`),
			part.path && !nameOf(part).includes(part.path) && !part.asked.includes(part.path) ? make("p", { class: "asked path" }, part.path) : "",
			...error, ...next, ...lost);
	}

	// explain asks for the sentences about the volume.
	async explain() {
		const { node, volume } = this;
		const turn = this.turn = (this.turn || 0) + 1;
		this.why.setAttribute("aria-busy", "true");
		if (!this.why.firstChild) this.why.append(make("p", { class: "quiet small" }, "Asking…"));
		let shown;
		try {
			const answer = await fetch(`explain?${new URLSearchParams({ node: node.name, pod: node.pod, volume: volume.volume })}`);
			if (!answer.ok) throw new Error(await answer.text());
			const { sections } = await answer.json();
			sections.sort((a, b) => isAdvice(b) - isAdvice(a)); // what to do comes first
			shown = make("dl", { class: "sections" }, ...sections.map(section));
		} catch (error) {
			shown = make("p", { class: "callout failing" }, `It could not be explained: ${error.message}`);
		}
		if (turn !== this.turn) return; // it was asked again meanwhile
		this.why.replaceChildren(shown);
		this.why.setAttribute("aria-busy", "false");
	}
}

const ageOf = (step) => span(step.ageNanoseconds / 1e6);

function running(step) {
	return [`${step.step} has been running for `, make("span", { class: "running" }, ageOf(step)), step.progress ? `: ${step.progress}` : ""];
}

// refusal tells of a call that was refused.
function refusal({ volume, call, code, error, at, since, times }) {
	const often = times > 1 ? [`, ${times} times, first `, time(since)] : [];
	return [`${call} was refused with ${code} `, time(at), ...often, ": ", ...coded(error.replace(`volume ${volume}: `, ""))];
}

const isAdvice = ({ title }) => title === "You can";

function section(of) {
	return make("div", { class: isAdvice(of) ? "do" : undefined },
		make("dt", {}, of.title), make("dd", {}, make("ul", {}, ...of.sentences.map((sentence) => make("li", {}, ...coded(sentence))))));
}

// What is shown

let view; // the last reading
const chosen = { state: "", words: [], group: "state" };

function matches(node, volume) {
	const text = [volume.volume, volume.claim, node.name, ...podsOf(volume)].join(" ").toLowerCase();
	return chosen.words.every((word) => text.includes(word));
}

const groups = {
	state: (node, volume) => stateOf(volume),
	node: (node) => node.name,
	namespace: (node, volume) => namespaceOf(volume),
};

function rank(state) {
	return states.findIndex(([name]) => name === state);
}

// show shows the last reading, as far as it was chosen.
function show() {
	const all = view.nodes.flatMap((node) => node.volumes.map((volume) => ({ node, volume })));
	const found = all.filter(({ node, volume }) => matches(node, volume));
	const shown = found.filter(({ volume }) => !chosen.state || stateOf(volume) === chosen.state);
	showTiles(found);
	say(byId("count"), countOf(shown.length, all.length));
	shown.sort((a, b) => rank(stateOf(a.volume)) - rank(stateOf(b.volume)) || titleOf(a.volume).localeCompare(titleOf(b.volume)) || a.node.name.localeCompare(b.node.name));
	const inGroups = new Map();
	for (const each of shown) {
		const name = groups[chosen.group](each.node, each.volume);
		inGroups.set(name, [...(inGroups.get(name) || []), each]);
	}
	let names = [...inGroups.keys()];
	if (chosen.group !== "state") names = names.sort();
	showGroups(names, inGroups);
	forget(rows, all.map(({ node, volume }) => keyOf(node, volume)));
}

// countOf says how many volumes are shown. Those of a node that could not be asked are
// not known, rather than none.
function countOf(shown, all) {
	const away = view.nodes.filter((node) => node.error).length;
	const unknown = away ? `; ${away === 1 ? "1 node" : `${away} nodes`} could not be asked` : "";
	if (all) return `${shown} of ${all} ${all === 1 ? "volume" : "volumes"} shown${unknown}`;
	return away || view.error || !view.at ? `No volume is known${unknown}` : `No volume is asked of ${view.nodes.length === 1 ? "this node" : "these nodes"}.`;
}

const keyOf = (node, volume) => JSON.stringify([node.name, node.pod, volume && volume.volume]);

// forget drops what is not there any more.
function forget(known, keys) {
	const there = new Set(keys);
	for (const key of known.keys()) if (!there.has(key)) known.delete(key);
}

const boxes = new Map(); // the groups, by name

function showGroups(names, inGroups) {
	arrange(byId("list"), names.map((name) => {
		if (!boxes.has(name)) {
			const head = make("h3"), list = make("ul", { class: "rows" });
			boxes.set(name, { head, list, element: make("section", { class: "group" }, head, list) });
		}
		const box = boxes.get(name), members = inGroups.get(name);
		const title = chosen.group === "state" ? name[0].toUpperCase() + name.slice(1) : name; // other names are as they are written
		say(box.head, `${title} · ${members.length}`);
		arrange(box.list, members.map(({ node, volume }) => {
			const key = keyOf(node, volume);
			if (!rows.has(key)) rows.set(key, new Row());
			rows.get(key).update(node, volume);
			return rows.get(key).element;
		}));
		return box.element;
	}));
	forget(boxes, names);
}

const tiles = new Map();

// showTiles shows how many volumes are in each state; a tile shows those alone.
function showTiles(volumes) {
	const count = (state) => volumes.filter(({ volume }) => !state || stateOf(volume) === state).length;
	const names = ["", ...states.map(([name]) => name).filter((name) => name === chosen.state || count(name))];
	arrange(byId("tiles"), names.map((name) => {
		if (!tiles.has(name)) {
			const number = make("b"), button = make("button", { type: "button", class: `tile ${style(name)}` }, number, ` ${name || "all"}`);
			button.addEventListener("click", () => {
				chosen.state = chosen.state === name ? "" : name;
				show();
			});
			tiles.set(name, { number, button });
		}
		const tile = tiles.get(name);
		say(tile.number, String(count(name)));
		tile.button.setAttribute("aria-pressed", String(chosen.state === name));
		return tile.button;
	}));
}

function receive(next) {
	view = next;
	clock = Date.parse(view.now) - Date.now();
	document.title = [view.title, view.nodes.length === 1 ? view.nodes[0].name : ""].filter(Boolean).join(" · ");
	say(byId("title"), document.title);
	say(byId("nodes-title"), view.nodes.length === 1 ? "Node" : `Nodes · ${view.nodes.length}`);
	say(byId("trouble"), troubleOf(view.nodes));
	if (!cards.size) byId("nodes-box").open = view.nodes.length <= manyNodes && !matchMedia("(max-width: 46rem)").matches;
	banners([view.error && `The nodes could not be read: ${view.error}`], view.notes || []);
	arrange(byId("nodes"), view.nodes.map((node) => {
		const key = keyOf(node);
		if (!cards.has(key)) cards.set(key, new Card());
		cards.get(key).update(node);
		return cards.get(key).element;
	}));
	forget(cards, view.nodes.map((node) => keyOf(node)));
	show();
	live(!view.error, view.error ? "Not up to date" : "Live");
	tick();
}

// banners shows errors and notes, anew only if they are others: they are announced.
function banners(errors, notes) {
	const texts = JSON.stringify([errors, notes]);
	if (texts === banners.shown) return;
	banners.shown = texts;
	byId("banners").replaceChildren(
		...errors.filter(Boolean).map((text) => make("p", { class: "banner" }, text)), ...notes.map((text) => make("p", { class: "banner note" }, text)));
}

function live(on, word) {
	byId("live").classList.toggle("on", on);
	byId("live").classList.toggle("off", !on);
	say(byId("live-word"), word);
}

function listen() {
	const events = new EventSource("events");
	events.onmessage = (event) => receive(JSON.parse(event.data));
	events.onerror = () => live(false, events.readyState === EventSource.CLOSED
		? "Ended: start the program again, and open the address that it prints" : "No connection: trying again");
}

byId("find").addEventListener("input", (event) => {
	chosen.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
	if (view) show();
});
byId("group").addEventListener("change", (event) => {
	chosen.group = event.target.value;
	if (view) show();
});
byId("tools").addEventListener("submit", (event) => event.preventDefault());

history.replaceState(null, "", location.pathname); // the token is in a cookie now
listen();
setInterval(tick, 1000);
