package ui

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// The page of a real plugin, on a phone: it shows a volume that cannot be taken down, why, and that it is gone once it can.
func TestPageOfAPlugin(t *testing.T) {
	plugin := harness.Start(t, harness.Options{})
	v := harness.NewVolume(t, plugin, "volume", harness.Shared("ext4"))
	must(t, v.Create(t.Context(), 32<<20, "thin"))
	must(t, v.Stage(t.Context()))
	holder, err := os.Open(v.Staging)
	must(t, err)
	program := exec.Command(harness.Binary(t), "ui", "--state-dir", plugin.StateDir)
	said, err := program.StdoutPipe()
	must(t, err)
	must(t, program.Start())
	t.Cleanup(func() {
		must(t, program.Process.Signal(os.Interrupt))
		must(t, program.Wait())
	})
	line, err := bufio.NewReader(said).ReadString('\n')
	must(t, err)
	p := &tab{t: t, address: strings.TrimSpace(strings.TrimPrefix(line, "The page is at "))}
	p.open(look{width: 390, height: 844, phone: true})
	p.until(`document.querySelector(".row .pill")?.innerText.includes("settled") && document.getElementById("live").innerText.startsWith("Live") && document.getElementById("count").innerText === "1 of 1 volume shown"`)
	if err := v.Unstage(t.Context()); err == nil {
		t.Error("it is unstaged while somebody is in it")
	}
	p.until(`document.querySelector(".row .glance")?.innerText.includes("it is in use by")`)
	eval[any](p, `document.querySelectorAll("details").forEach((d) => d.open = true)`)
	p.until(`document.querySelector(".sections .do") && document.querySelector(".story").innerText.includes("stage is failing")`)
	if wide := eval[int64](p, `document.documentElement.scrollWidth`); wide > 390 {
		t.Errorf("one scrolls sideways: %d wide", wide)
	}
	p.shoot("plugin")
	must(t, holder.Close())
	v.EndInTime()
	p.until(`document.querySelectorAll(".row").length === 0 && document.getElementById("count").innerText === "No volume is asked of this node."`)
}
