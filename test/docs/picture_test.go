package docs

import (
	"flag"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var update = flag.Bool("update", false, "draw docs/demo.svg anew")

const picture = "docs/demo.svg"

// TestDemoPicture: the picture shows what the demo prints, but for its times and numbers.
func TestDemoPicture(t *testing.T) {
	t.Parallel()
	machine.Kernel(t)
	result := harness.Run(t, []string{"TMPDIR=" + t.TempDir()}, harness.Binary(t), "demo")
	if result.Code != 0 {
		t.Fatalf("the demo ended with %+v", result)
	}
	drawn := draw(t, result.Stdout)
	if *update {
		require.NoError(t, os.WriteFile(filepath.Join(root, picture), []byte(drawn), 0o644))
	}
	if shown := read(t, picture); masked(shown) != masked(drawn) {
		t.Errorf("%s does not show what the demo prints now: go test ./test/docs -run '^TestDemoPicture$' -update\nit is\n%s\nand should be\n%s", picture, shown, drawn)
	}
}

// masked is a picture without what differs from run to run.
func masked(picture string) string {
	picture = regexp.MustCompile(`(?:[0-9][0-9.]*(?:ns|µs|ms|s|m|h)?)+`).ReplaceAllString(picture, "0")
	return regexp.MustCompile(`\s+`).ReplaceAllString(picture, " ")
}

// step is one of the demo's steps as it tells of it.
type step struct {
	number, title, took string
	status              []string // the table that it shows afterwards
}

var (
	stepLine = regexp.MustCompile(`^ ?(\d+)\. (.*)$`)
	tookLine = regexp.MustCompile(`^    ok in (\S+?):?(?: .*)?$`)
)

// story reads what the demo prints, up to its last line.
func story(t *testing.T, output string) (steps []step, end string) {
	t.Helper()
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, " \n")
		number, took := stepLine.FindStringSubmatch(line), tookLine.FindStringSubmatch(line)
		switch now := len(steps) - 1; {
		case number != nil:
			steps = append(steps, step{number: number[1], title: number[2]})
		case took != nil && now >= 0:
			steps[now].took = took[1]
		case strings.HasPrefix(line, "      ") && now >= 0:
			steps[now].status = append(steps[now].status, line[6:])
		case line != "":
			end = line
		}
	}
	if len(steps) < 10 || !strings.HasPrefix(end, "A whole life") {
		t.Fatalf("the demo tells another story:\n%s", output)
	}
	return steps, end
}

// columns cuts the columns of these names out of a table, whose first line has the names. What a line of its own tells
// of the row above comes last.
func columns(t *testing.T, table []string, names ...string) [][]string {
	t.Helper()
	header := regexp.MustCompile(`\S+(?: \S+)*`).FindAllStringIndex(table[0], -1)
	var rows [][]string
	for _, line := range table {
		if told := strings.TrimSpace(line); strings.HasPrefix(told, "(") && len(rows) > 0 {
			rows[len(rows)-1][len(names)] = told
			continue
		}
		runes, row := []rune(line), []string(nil)
		for _, name := range names {
			cell, found := "", false
			for i, at := range header {
				if table[0][at[0]:at[1]] != name {
					continue
				}
				end := len(runes)
				if i+1 < len(header) {
					end = min(end, header[i+1][0])
				}
				cell, found = strings.TrimSpace(string(runes[min(at[0], end):end])), true
			}
			if !found {
				t.Fatalf("the status has no column %s: %s", name, table[0])
			}
			row = append(row, cell)
		}
		rows = append(rows, append(row, ""))
	}
	return rows
}

// Sizes of the picture, in pixels.
const (
	pictureWidth = 960
	lineHeight   = 20
	margin       = 22
	numberX      = 38
	titleX       = 52
	tookX        = pictureWidth - margin
	askedX       = 280
	isX          = 615
	whyX         = 680
)

// style is for light and for dark pages.
const style = `
.page { fill: #ffffff; stroke: #d0d7de }
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
.dim { fill: #656d76 }
.call { font-weight: 600 }
.good { fill: #1a7f37 }
.heal { fill: #9a6700 }
.took { fill: #1a7f37 }
.took, .number { text-anchor: end }
.table { fill: #f6f8fa }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; stroke: #30363d }
text { fill: #e6edf3 }
.dim { fill: #8d96a0 }
.good, .took { fill: #3fb950 }
.heal { fill: #d29922 }
.table { fill: #161b22 }
}
`

// draw makes the picture: each step with the time that it took, and what is asked and what is, once when all is
// published and once when it was torn off and healed.
func draw(t *testing.T, output string) string {
	t.Helper()
	steps, end := story(t, output)
	var body strings.Builder
	y := margin + 6
	text := func(x int, class, words string) {
		if words != "" {
			fmt.Fprintf(&body, "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, html.EscapeString(words))
		}
	}
	text(margin, "dim", "$ make demo")
	y += lineHeight + 6
	for _, s := range steps {
		text(numberX, "number dim", s.number)
		call, rest, _ := strings.Cut(s.title, ":")
		if !strings.Contains(call, " ") {
			fmt.Fprintf(&body, "<text x=\"%d\" y=\"%d\"><tspan class=\"call\">%s</tspan>%s</text>\n", titleX, y, html.EscapeString(call), html.EscapeString(rest))
		} else {
			text(titleX, "", s.title)
		}
		text(tookX, "took", s.took)
		y += lineHeight
		published, healed := strings.Contains(s.title, "second pod") && len(s.status) > 2, strings.Contains(s.title, "healed")
		if !published && !healed {
			continue
		}
		rows := columns(t, s.status, "PART", "ASKED", "IS")
		fmt.Fprintf(&body, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"6\" class=\"table\"/>\n",
			titleX-8, y-lineHeight/2-2, pictureWidth-titleX-margin+16, len(rows)*lineHeight+4)
		y += lineHeight / 4
		for i, row := range rows {
			classes := []string{"", "", "good", "heal"}
			if i == 0 {
				classes = []string{"dim", "dim", "dim", "dim"}
				row[3] = ""
			}
			if row[2] != "settled" && i > 0 {
				t.Errorf("after %q the demo shows %q", s.title, row)
			}
			for column, x := range []int{titleX, askedX, isX, whyX} {
				text(x, classes[column], strings.Trim(row[column], "()"))
			}
			y += lineHeight
		}
		y += lineHeight / 3
	}
	y += 6
	text(margin, "good", end)
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img">
<title>make demo: the life of a volume</title>
<style>%s</style>
<rect x="0.5" y="0.5" width="%d" height="%d" rx="8" class="page"/>
%s</svg>
`, pictureWidth, y+margin, pictureWidth, y+margin, style, pictureWidth-1, y+margin-1, body.String())
}
