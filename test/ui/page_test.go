package ui

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/csi-node/csi-node/pkg/report"
)

var (
	update = flag.Bool("update", false, "draw docs/ui.png anew")
	shots  = flag.String("shots", "", "write pictures of the page, into this directory")
)

const (
	// shown is true once all rows of the shop are there.
	shown = `document.querySelectorAll(".row").length === 8`
	// names are the names of the volumes, in their order.
	names = `[...document.querySelectorAll(".row .name")].map((e) => e.firstChild.textContent)`
	// focused is what has the keyboard.
	focused = `(document.activeElement.closest("summary,button,input,select,section,a") || document.activeElement)`
)

// openAll opens all volumes and all nodes' numbers, and waits until they are explained.
const openAll = `document.querySelectorAll("details").forEach((d) => d.open = true)`
const explained = `[...document.querySelectorAll("[aria-busy]")].length === 8 && document.querySelectorAll("[aria-busy=true]").length === 0`

func TestPageShowsTheCluster(t *testing.T) {
	p := open(t, shop(), desk)
	p.until(shown)
	if got := eval[string](p, "location.href"); got != p.address {
		t.Errorf("the address is %s: the token stays in it", got)
	}
	if got := eval[string](p, "document.cookie"); got != "" {
		t.Errorf("scripts can read the cookie %s", got)
	}
	want := []string{"shop/search-index", id("0d94b7aa"), "media/uploads", "ci/runner-5x8kq", "monitoring/prometheus", "shop/cache", "shop/orders-db", "shop/queue"}
	if got := eval[[]string](p, names); !slices.Equal(got, want) {
		t.Errorf("the volumes are %q, not %q", got, want)
	}
	text := eval[string](p, "document.body.innerText")
	for _, words := range []string{
		"kubectl csi-node", "worker-1", "worker-2", "worker-3", "This node could not be asked: kubectl exec: error dialing backend", "no route to host",
		"212Gi of 500Gi free, 187Gi for new volumes", "92% used", "lvm vg-fast", "412Gi of 930Gi free", "4 volumes, 1 failing",
		"it is not formatted over", "Refused: mount option \"noatim\": ext4 does not know it", "Format for stage has been running for 12s: 31 of 200Gi proved blank", "8 of 8 volumes shown", "9d ago",
	} {
		if !strings.Contains(text, words) {
			t.Errorf("the page does not say %q", words)
		}
	}
	eval[any](p, openAll)
	p.until(explained)
	text = eval[string](p, "document.body.innerText")
	for _, words := range []string{"In the way", "You can", "Mend what is in the way", "Next try: ", "Registered with kubelet 220h", "Pod csi-node/csi-node-17xq2", "Lost once, last ", "NodeStageVolume was refused with InvalidArgument 5", "s ago, 4 times, first 6m ago: mount option", "Asked: published", "What new volumes and growth can be promised.", "187Gi", "shop/postgres-0 was lost, not by the plugin's doing"} {
		if !strings.Contains(text, words) {
			t.Errorf("the page does not say %q in\n%s", words, text)
		}
	}
	if got := eval[string](p, `document.querySelector(".sections .do code").textContent`); got != "csi-node volume retry "+id("9c41e7d2") {
		t.Errorf("the first command is %s", got)
	}
	p.forget() // the refused volume alone has no record here, and its explanation is an error
}

// What changes is shown at once. What is open stays open, the keyboard's place stays, and nothing is explained again
// that is as it was.
func TestPageIsLive(t *testing.T) {
	s := shop()
	p := open(t, s, desk)
	p.until(shown)
	eval[any](p, `document.querySelectorAll(".row summary")[4].focus()`)
	p.press(kb.Enter)
	p.until(`document.querySelectorAll(".row details[open] dl").length === 1`)
	const open = `document.querySelector(".row details[open] .name").firstChild.textContent`
	if got := eval[string](p, open); got != "monitoring/prometheus" {
		t.Fatalf("open is %s", got)
	}
	s.change(func(s *scene) {
		parts := s.nodes[0].Volumes[3].Parts
		path := parts[1].Path
		parts[1].Is, parts[1].Error = report.Failing, "volume "+s.nodes[0].Volumes[3].Volume+": step unbind for target "+path+": unmount "+path+": it is in use by pid 8 (sleep): end that first"
	})
	const told = "step unbind for target …/mount: unmount …/mount: it is in use by pid 8 (sleep): end that first"
	p.until(fmt.Sprintf(`document.querySelector(".row .glance").textContent === %q`, told))
	if got := eval[[]string](p, names)[0]; got != "monitoring/prometheus" {
		t.Errorf("the first is %s", got)
	}
	if got := eval[string](p, focused+`.querySelector(".name").firstChild.textContent`); got != "monitoring/prometheus" {
		t.Errorf("the keyboard is at %s", got)
	}
	p.until(`document.querySelector(".row details[open] .story").innerText.includes("monitoring/prometheus-0 is failing: ` + told + `")`)
	p.until(`document.querySelector(".row details[open] .sections").innerText.includes("it is in use by pid 8 (sleep)")`)
	var before []report.NodeOf
	s.change(func(s *scene) {
		if len(s.asked) != 2 {
			t.Errorf("asked to explain were %q", s.asked)
		}
		s.nodes[0].Volumes = s.nodes[0].Volumes[:3]
		s.nodes = s.nodes[:2]
		before = s.nodes
		s.notes = []string{"Claims are not named: forbidden"}
	})
	p.until(`document.querySelectorAll(".row").length === 7 && document.querySelectorAll(".node").length === 2 && document.querySelector(".banner").innerText === "Claims are not named: forbidden"`)
	s.change(func(s *scene) {
		s.nodes = []report.NodeOf{{Name: "worker-1", Error: "it is away"}, {Name: "worker-2", Error: "it is away"}}
	})
	p.until(`document.getElementById("count").innerText === "No volume is known; 2 nodes could not be asked"`)
	s.change(func(s *scene) { s.nodes = before })
	p.until(`document.getElementById("count").innerText === "7 of 7 volumes shown"`)
	s.change(func(s *scene) { s.err = errors.New("the cluster is away") })
	p.until(`document.querySelector(".banner").innerText === "The nodes could not be read: the cluster is away" && document.getElementById("live").innerText.startsWith("Not up to date")`)
	if n := eval[int](p, `document.querySelectorAll(".row").length`); n != 7 {
		t.Errorf("%d volumes are left of what was read", n)
	}
	s.change(func(s *scene) { s.err = nil })
	p.until(`document.getElementById("live").innerText.startsWith("Live")`)

	p.stop()
	must(t, <-p.stopped)
	p.until(`document.getElementById("live").innerText.startsWith("No connection")`)
	serve(t, s, port(p.address)) // with another token
	p.until(`document.getElementById("live").innerText.startsWith("Ended: start the program again")`)
	p.forget() // that it was refused
}

// A pod whose call is refused waits, however well the volume is for others: it is not among the settled ones.
func TestRefusedIsNotSettled(t *testing.T) {
	s := shop()
	refused := report.Refusal{Volume: id("e3c8d6b4"), Call: "NodePublishVolume", Code: "FailedPrecondition", Since: time.Now(), At: time.Now(), Times: 1, Error: "shop/nats-0 has it alone"}
	s.nodes[1].Refusals = append(s.nodes[1].Refusals, refused)
	busy := refused
	busy.Volume = id("d80b5512") // is under way
	s.nodes[1].Refusals = append(s.nodes[1].Refusals, busy)
	p := open(t, s, desk)
	p.until(shown)
	if got, want := eval[[]string](p, `[...document.querySelectorAll(".group h3")].map((e) => e.textContent)`), []string{"Failing · 1", "Refused · 2", "Under way · 1", "Settled · 4"}; !slices.Equal(got, want) {
		t.Errorf("the groups are %q, not %q", got, want)
	}
	eval[any](p, `document.querySelectorAll(".tile")[2].click()`)
	if got, want := eval[[]string](p, names), []string{id("0d94b7aa"), "shop/queue"}; !slices.Equal(got, want) {
		t.Errorf("refused are %q, not %q", got, want)
	}
	if got := eval[string](p, `document.querySelectorAll(".node")[1].querySelector(".quiet").textContent`); got != "4 volumes, 2 refused, 1 under way" {
		t.Errorf("the node has %s", got)
	}
}

// What is selected stays while only ages change.
func TestSelectionStays(t *testing.T) {
	s := shop()
	p := open(t, s, desk)
	p.until(shown)
	eval[any](p, `getSelection().selectAllChildren(document.querySelector(".node .told"))`)
	was := s.nodes[0].Volumes
	s.change(func(s *scene) { s.nodes[0].Volumes = was[:3] })
	p.until(`document.querySelectorAll(".row").length === 7`)
	if got := eval[string](p, "getSelection().toString()"); !strings.HasPrefix(got, "This node could not be asked") {
		t.Errorf("of a node that is as it was %q is selected", got)
	}
	s.change(func(s *scene) { s.nodes[0].Volumes = was })
	p.until(shown)
	eval[any](p, openAll)
	p.until(explained)
	for _, callout := range []string{"refused", "under-way"} {
		eval[any](p, fmt.Sprintf(`getSelection().selectAllChildren(document.querySelector(".callout.%s"))`, callout))
		before := eval[string](p, "getSelection().toString()")
		s.change(func(s *scene) { s.nodes[1].Volumes[0].Step.Age += time.Minute })
		p.until(fmt.Sprintf(`document.querySelector(".glance .running").innerText === %q`, map[string]string{"refused": "1m", "under-way": "2m"}[callout]))
		if after := eval[string](p, "getSelection().toString()"); len(after) < len("was refused with") || len(after) < len(before)-2 {
			t.Errorf("of %q %q is selected", before, after)
		}
	}
	p.forget() // the explanation of the refused volume
}

// A volume that comes, goes or changes leaves the others where they are, with what is selected in them.
func TestOthersAreNotMoved(t *testing.T) {
	s := shop()
	p := open(t, s, desk)
	p.until(shown)
	const pick = `getSelection().selectAllChildren([...document.querySelectorAll(".row .name")].find((e) => e.textContent.startsWith("shop/queue")))`
	eval[any](p, pick)
	was := s.nodes[0].Volumes
	for _, c := range []struct {
		what, until string
		change      func(*scene)
	}{
		{"a group went", `document.querySelectorAll(".row").length === 7`, func(s *scene) { s.nodes[0].Volumes = slices.Delete(s.nodes[0].Volumes, 1, 2) }},
		{"the first of the group went", `document.querySelectorAll(".row").length === 6`, func(s *scene) { s.nodes[1].Volumes = slices.Delete(s.nodes[1].Volumes, 1, 2) }},
		{"a group came", `document.querySelectorAll(".row").length === 7`, func(s *scene) { s.nodes[0].Volumes = was }},
		{"the first of the group became the last", `[...document.querySelectorAll(".rows .name")].pop().textContent.startsWith("shop/search-index")`, func(s *scene) {
			eval[any](p, `(() => { const by = document.getElementById("group"); by.value = "namespace"; by.dispatchEvent(new Event("change")); })()`)
			eval[any](p, pick)
			s.nodes[0].Volumes[1].Parts[0].Is, s.nodes[0].Volumes[1].Parts[0].Error = report.Settled, ""
		}},
	} {
		s.change(c.change)
		p.until(c.until)
		if got := eval[string](p, "getSelection().toString()"); !strings.HasPrefix(got, "shop/queue") {
			t.Errorf("%s: %q is selected", c.what, got)
		}
	}
}

// Names and errors come from whoever may make a pod: they are text, whatever is in them.
func TestTextIsNoMarkup(t *testing.T) {
	const evil = `<img src=x onerror="document.title='taken'"><script>document.title='taken'</script><a href="https://evil.example">`
	s := shop()
	s.nodes[0].Volumes[0] = report.Status{Volume: evil, Claim: "ns/" + evil, Device: evil, Holder: evil, Step: &report.StepStatus{Step: evil, Progress: evil},
		Parts: []report.PartStatus{{Part: evil, Path: evil, Pod: evil, Asked: evil, Is: report.Failing, Error: "`" + evil + "`"}}}
	s.nodes[1].Name, s.nodes[1].Driver, s.nodes[1].Refusals[0].Error = evil, evil, evil
	s.nodes[2].Error, s.notes = evil, []string{evil}
	s.nodes[0].Storage[0].Values = append(s.nodes[0].Storage[0].Values, report.Value{Name: evil, Help: evil, Labels: map[string]string{evil: evil}})
	p := open(t, s, desk)
	p.until(shown)
	eval[any](p, openAll)
	p.until(explained)
	if n := eval[int](p, `document.querySelectorAll("main img, main script, main a").length`); n != 0 {
		t.Errorf("%d elements were made of a text", n)
	}
	if n := eval[int](p, fmt.Sprintf(`document.body.innerText.split(%q).length - 1`, evil)); n < 20 {
		t.Errorf("the text is shown %d times", n)
	}
	if title := eval[string](p, "document.title"); title != "kubectl csi-node" {
		t.Errorf("the title is %s", title)
	}
	// The policy holds, too, should a script ever try.
	if got := eval[string](p, `(() => { try { document.body.innerHTML = "<b>x</b>"; return "done" } catch (e) { return e.name } })()`); got != "TypeError" {
		t.Errorf("markup of a text: %s", got)
	}
	p.forget() // that this was refused, and an explanation
}

// All that a mouse can do the keyboard can, in the order of the page, and one sees where it is.
func TestKeyboard(t *testing.T) {
	p := open(t, shop(), desk)
	p.until(shown)
	var walk []string
	for range 60 {
		p.press(kb.Tab)
		at := eval[struct {
			Name, Outline string
		}](p, `(() => {
			const e = document.activeElement, style = getComputedStyle(e);
			return {name: e.id || e.textContent.replace(/\s+/g, " ").trim(), outline: style.outlineStyle + " " + style.outlineWidth};
		})()`)
		if eval[bool](p, `document.activeElement === document.body`) {
			break
		}
		walk = append(walk, at.Name)
		if at.Outline != "solid 3px" {
			t.Errorf("at %q one does not see where the keyboard is: %+v", at.Name, at)
		}
		p.until(`(() => { const r = document.activeElement.getBoundingClientRect(); return r.width > 0 && r.left >= 0 && r.top >= 0 && r.bottom <= innerHeight + 1; })()`)
	}
	want := []string{"Skip to the volumes", "Nodes · 3 1 in trouble, 1 nearly full", "More", "More", "More", "8 all", "1 failing", "1 refused", "1 under way", "5 settled", "find", "group"}
	if got := walk[:min(len(want), len(walk))]; !slices.Equal(got, want) || len(walk) != len(want)+8 {
		t.Errorf("the keyboard walks %q", walk)
	}

	eval[any](p, `document.activeElement.blur(); scrollTo(0, 0); document.querySelector(".skip").focus()`)
	p.press(kb.Enter)
	p.until(`document.activeElement.id === "volumes"`)
	p.press(kb.Tab, kb.Tab, " ") // "all", "failing"
	p.until(`document.querySelectorAll(".row").length === 1`)
	if got := eval[[]string](p, names); got[0] != "shop/search-index" || eval[string](p, `document.activeElement.getAttribute("aria-pressed")`) != "true" {
		t.Errorf("failing are %q", got)
	}
	p.press(" ")
	p.until(shown)
	eval[any](p, `document.getElementById("find").focus()`)
	p.press("SHOP", " ", "worker-1")
	p.until(`document.querySelectorAll(".row").length === 3`)
	if got := eval[string](p, `document.getElementById("count").innerText`); got != "3 of 8 volumes shown; 1 node could not be asked" {
		t.Errorf("it says %s", got)
	}
	p.press(kb.Enter) // loads nothing
	p.press(kb.Tab)
	for _, c := range []struct {
		key    string
		groups []string
	}{{"n", []string{"worker-1 · 3"}}, {"namespace", []string{"shop · 3"}}} {
		p.press(c.key)
		p.until(fmt.Sprintf(`document.querySelector(".group h3").innerText === %q`, c.groups[0]))
	}
	p.press(kb.Tab, kb.Enter)
	p.until(`document.activeElement.parentElement.open && document.querySelector("details[open] .sections")`)
	p.press(kb.Tab)
	if got := eval[string](p, focused+".innerText"); got != "Look again" {
		t.Errorf("within a volume the keyboard is at %s", got)
	}
}

// Who hears the page, and walks by buttons or meters alone, knows of what each of them is.
func TestNamesTellApart(t *testing.T) {
	p := open(t, shop(), desk)
	p.until(shown)
	eval[any](p, openAll)
	p.until(explained)
	called := eval[[]string](p, `[...document.querySelectorAll("summary, button, [role=meter]")].map((e) => e.getAttribute("aria-label") || e.textContent)`)
	slices.Sort(called)
	if all := slices.Clone(called); len(all) < 25 || len(slices.Compact(called)) != len(all) {
		t.Errorf("of these some are called the same: %q", all)
	}
	p.forget() // one explanation is an error
}

// contrast returns the texts that are hard to read: less than 4.5 to 1 against what is behind them (WCAG 2.2, 1.4.3), and
// the controls whose edges are hard to see: less than 3 to 1 (1.4.11).
const contrast = `(() => {
	const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
	const rgba = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
	const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
	const behind = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
	const bad = [];
	let seen = 0;
	const ratioOf = (one, other) => { const [a, b] = [light(one), light(other)].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
	for (const e of document.querySelectorAll("input, select, button")) {
		const ratio = ratioOf(rgba(getComputedStyle(e).borderTopColor), behind(e.parentElement));
		if (e.checkVisibility() && ratio < 3) bad.push(ratio.toFixed(2) + ": the edge of " + (e.id || e.textContent.trim()));
	}
	for (const e of document.querySelectorAll("body *")) {
		if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.checkVisibility()) continue;
		seen++;
		const ratio = ratioOf(rgba(getComputedStyle(e).color), behind(e));
		if (ratio < 4.5) bad.push(ratio.toFixed(2) + ": " + e.textContent.trim());
	}
	return {seen, bad};
})()`

// looks are how people look at the page.
var looks = []look{
	desk, {width: 1280, height: 900, dark: true},
	{width: 390, height: 844, phone: true}, {width: 390, height: 844, phone: true, dark: true}, {width: 320, height: 640, phone: true},
}

// TestPictures: the page as it is opened on each screen, and with its first volume open, can be drawn: with -shots, for
// whoever wants to look at them.
func TestPictures(t *testing.T) {
	for _, l := range looks {
		p := open(t, shop(), l)
		p.until(shown)
		for _, what := range []string{"closed", "open"} {
			if what == "open" {
				eval[any](p, `document.querySelector(".row details").open = true`)
				p.until(`document.querySelector(".sections")`)
			}
			drawn := p.shoot(fmt.Sprintf("%d-dark-%t-%s", l.width, l.dark, what))
			if int64(drawn.Width) != l.width || int64(drawn.Height) < l.height {
				t.Errorf("%+v, %s: the picture is %d by %d", l, what, drawn.Width, drawn.Height)
			}
		}
	}
}

// shoot draws the whole page.
func (p *tab) shoot(name string) image.Config {
	p.t.Helper()
	raw, err := chromedp.Run(p.context, chromedp.FullScreenshot(100))
	must(p.t, err)
	drawn, err := png.DecodeConfig(bytes.NewReader(raw))
	must(p.t, err)
	if *shots != "" {
		must(p.t, os.WriteFile(filepath.Join(*shots, name+".png"), raw, 0o644))
	}
	return drawn
}

// placeholder is by how much the hint in the field is longer than that.
const placeholder = `(() => {
	const field = document.getElementById("find"), style = getComputedStyle(field), canvas = document.createElement("canvas").getContext("2d");
	canvas.font = style.font;
	return canvas.measureText(field.placeholder).width - (field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
})()`

func TestPhoneAndDark(t *testing.T) {
	p := open(t, shop(), desk)
	p.until(shown)
	eval[any](p, openAll)
	p.until(explained)
	grounds := map[string]bool{}
	for _, l := range looks {
		p.look(l)
		p.until(fmt.Sprintf(`innerWidth === %d`, l.width))
		name := fmt.Sprintf("%d wide, dark: %t", l.width, l.dark)
		grounds[eval[string](p, `getComputedStyle(document.body).backgroundColor`)] = true
		if wide := eval[int64](p, `document.documentElement.scrollWidth`); wide > l.width {
			t.Errorf("%s: one scrolls sideways: %d wide", name, wide)
		}
		cut := eval[[]string](p, `[...document.querySelectorAll("body *")].filter((e) => !e.matches(".skip") && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.tagName + " " + e.className + ": " + e.textContent.slice(0, 60))`)
		if len(cut) > 0 {
			t.Errorf("%s: cut off are %q", name, cut)
		}
		if hint := eval[float64](p, placeholder); hint > 0 {
			t.Errorf("%s: the hint of what can be found is %.0f pixels too long", name, hint)
		}
		read := eval[struct {
			Seen int
			Bad  []string
		}](p, contrast)
		if len(read.Bad) > 0 || read.Seen < 100 {
			t.Errorf("%s: of %d texts these are hard to read: %q", name, read.Seen, read.Bad)
		}
		small := eval[[]string](p, `[...document.querySelectorAll("button, input, select, .row summary")].filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 24).map((e) => e.innerText)`)
		if len(small) > 0 {
			t.Errorf("%s: too small for a finger are %q", name, small)
		}
	}
	if len(grounds) != 2 {
		t.Errorf("the page has the grounds %v, not a light and a dark one", grounds)
	}
	p.forget() // one explanation is an error
}

// In the colours of the system there are no backgrounds and no shadows: how full a pool is, and which volumes are shown,
// is seen all the same.
func TestForcedColours(t *testing.T) {
	p := open(t, shop(), look{width: 1280, height: 900, dark: true, forced: true})
	p.until(shown)
	const ground = `getComputedStyle(document.querySelector(%q)).backgroundColor`
	if bar, node := eval[string](p, fmt.Sprintf(ground, ".bar span")), eval[string](p, fmt.Sprintf(ground, ".node")); bar == node {
		t.Errorf("how full it is has the colour %s of what is behind it", bar)
	}
	edges := eval[[]string](p, `[...document.querySelectorAll(".tile")].slice(0, 2).map((e) => getComputedStyle(e).border)`)
	if edges[0] == edges[1] {
		t.Errorf("what is pressed has the edge of what is not: %s", edges[0])
	}
	p.shoot("forced")
}

const (
	mostPicture  = 150 << 10 // bytes of docs/ui.png
	pictureWidth = 1120
)

// TestPicture: the picture in the documentation is one, and small. Pixels differ from browser to browser, so nothing is
// compared.
func TestPicture(t *testing.T) {
	const name = "../../docs/ui.png"
	if *update {
		s := shop()
		p := open(t, s, look{width: pictureWidth, height: 1350})
		p.until(shown)
		problem := s.nodes[0].Volumes[1].Parts[0]
		s.change(func(s *scene) {
			s.nodes[0].Volumes[1].Parts[0].Is, s.nodes[0].Volumes[1].Parts[0].Error = report.UnderWay, ""
		})
		p.until(`document.querySelector(".group h3").innerText.startsWith("Refused")`)
		s.change(func(s *scene) { s.nodes[0].Volumes[1].Parts[0] = problem })
		p.until(`document.querySelector(".group h3").innerText.startsWith("Failing")`)
		eval[any](p, `document.querySelector(".row details").open = true`)
		p.until(`document.querySelector(".sections")`)
		raw, err := chromedp.Run(p.context, chromedp.CaptureScreenshot())
		must(t, err)
		drawn, err := png.Decode(bytes.NewReader(raw))
		must(t, err)
		var small bytes.Buffer
		must(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&small, paletted(drawn)))
		must(t, os.WriteFile(name, small.Bytes(), 0o644))
	}
	picture, err := os.ReadFile(name)
	must(t, err)
	drawn, err := png.DecodeConfig(bytes.NewReader(picture))
	if err != nil || len(picture) > mostPicture || drawn.Width != pictureWidth {
		t.Errorf("%s has %d bytes, more than %d, or another width than it was drawn with: %+v (%v)", name, len(picture), mostPicture, drawn, err)
	}
}

// paletted returns a picture in 256 colours: each is the one that is missed most, by how much of it there is and how far
// it is from those that are taken.
func paletted(of image.Image) image.Image {
	type missed struct{ count, far int }
	colours := map[color.NRGBA]*missed{}
	for y := of.Bounds().Min.Y; y < of.Bounds().Max.Y; y++ {
		for x := of.Bounds().Min.X; x < of.Bounds().Max.X; x++ {
			c := color.NRGBAModel.Convert(of.At(x, y)).(color.NRGBA)
			if colours[c] == nil {
				colours[c] = &missed{far: 3 * 255 * 255}
			}
			colours[c].count++
		}
	}
	var palette color.Palette
	for range min(len(colours), 256) {
		var next color.NRGBA
		most := -1
		for c, m := range colours {
			if m.count*m.far > most {
				next, most = c, m.count*m.far
			}
		}
		palette = append(palette, next)
		for c, m := range colours {
			r, g, b := int(c.R)-int(next.R), int(c.G)-int(next.G), int(c.B)-int(next.B)
			m.far = min(m.far, r*r+g*g+b*b)
		}
	}
	small := image.NewPaletted(of.Bounds(), palette)
	draw.Draw(small, of.Bounds(), of, of.Bounds().Min, draw.Src)
	return small
}
