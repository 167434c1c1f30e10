package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Bounds of the table, in columns. What does not fit into a cell loses its middle;
// PrintWide has all of it.
const (
	tableWidth  = 120
	volumeWidth = 40 // the id of a provisioned volume
	partWidth   = 28
	leastWidth  = 12 // no column is made narrower for a narrow terminal
)

// widthFor is how wide a table may be where it is written: as the terminal, or tableWidth.
func widthFor(out io.Writer) int {
	if f, is := out.(interface{ Fd() uintptr }); is {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return min(int(size.Col), tableWidth)
		}
	}
	return tableWidth
}

// Print writes the report as a table of at most tableWidth columns, or those of a narrower
// terminal: one row for each part, and beneath it what is wrong with it.
func (n Node) Print(out io.Writer) error {
	_, err := io.WriteString(out, n.table(widthFor(out)))
	return err
}

func (n Node) table(width int) string {
	var text strings.Builder
	for _, told := range n.Told() {
		text.WriteString(told + "\n")
	}
	if len(n.Volumes) == 0 {
		text.WriteString(none(n.left, "this node has", "No volume is asked of this node.") + "\n")
	} else {
		align(&text, append([]row{head}, n.rows(time.Now())...), width)
	}
	n.refused(&text, width)
	return text.String()
}

// PrintWide writes the report as a table with all that Print leaves out, in lines of
// any length.
func (n Node) PrintWide(out io.Writer) error {
	var text strings.Builder
	for _, told := range n.Told() {
		text.WriteString(told + "\n")
	}
	if len(n.Volumes) == 0 {
		text.WriteString(none(n.left, "this node has", "No volume is asked of this node.") + "\n")
	} else if err := n.wide(&text, time.Now()); err != nil {
		return err
	}
	n.refused(&text, 0)
	_, err := io.WriteString(out, text.String())
	return err
}

// none says that there is no volume: unless a filter left some out, in these words.
func none(left int, has, words string) string {
	if left > 0 {
		return fmt.Sprintf("No volume matches; %s %d in all.", has, left)
	}
	return words
}

// refused lists the calls that were refused not long ago.
func (n Node) refused(text *strings.Builder, width int) {
	if len(n.Refusals) > 0 {
		text.WriteString(refusedTitle)
	}
	for _, told := range tellRefusals(n.Refusals, width == 0, time.Now()) {
		write(text, "  ", told, width)
	}
}

// row is a row of a table, and the lines beneath it.
type row struct {
	cells   []string
	beneath []string
}

// head is the first row of the table of a node, in the order of the constants below.
var head = row{cells: []string{"VOLUME", "PART", "ASKED", "IS", "SINCE", "NEXT TRY"}}

const askedCell = 2

// rows returns one row for each part, and what is wrong beneath it.
func (n Node) rows(now time.Time) []row {
	var rows []row
	for _, v := range n.Volumes {
		for i, p := range v.Parts {
			r := row{cells: []string{shortened(cmp.Or(v.Claim, v.Volume), volumeWidth), shortened(p.name(), partWidth), p.asked(), string(p.Is), age(now.Sub(p.Since)), p.next(now)}}
			if detail := p.detail(now); detail != "" {
				r.beneath = append(r.beneath, detail)
			}
			if i == len(v.Parts)-1 && v.Worst() != Settled {
				r.beneath = append(r.beneath, v.detail())
			}
			rows = append(rows, r)
		}
	}
	return rows
}

// align writes rows in columns, which are made narrower until they fit.
func align(text *strings.Builder, rows []row, width int) {
	widths := make([]int, len(rows[0].cells))
	for _, r := range rows {
		for i, cell := range r.cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	all := 2 * (len(widths) - 1)
	for _, w := range widths {
		all += w
	}
	for widest := slices.Max(widths); all > width && widest > leastWidth; widest = slices.Max(widths) {
		widths[slices.Index(widths, widest)]--
		all--
	}
	for _, r := range rows {
		var line strings.Builder
		for i, cell := range r.cells {
			cell = shortened(cell, widths[i])
			line.WriteString(cell + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+2))
		}
		text.WriteString(strings.TrimRight(line.String(), " ") + "\n")
		for _, words := range r.beneath {
			write(text, "    ", words, width)
		}
	}
}

// wide writes one row for each part, which has everything in it.
func (n Node) wide(text *strings.Builder, now time.Time) error {
	t := tabwriter.NewWriter(text, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "VOLUME\tPART\tASKED\tIS\tSINCE\tNEXT TRY\tVOLUME IS\tDEVICE\tPATH\tDETAIL")
	for _, v := range n.Volumes {
		for _, p := range v.Parts {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", inFull(v.Volume, v.Claim), p.name(), strings.Replace(p.Asked, " at "+p.Path, "", 1), p.Is,
				age(now.Sub(p.Since)), p.next(now), v.Worst(), v.detail(), p.Path, p.detail(now))
		}
	}
	return t.Flush()
}

// inFull is a volume by its id and, where it is known, its claim.
func inFull(volume, claim string) string {
	volume = state.Plain(volume) // a call that was refused may name anything
	if claim == "" {
		return volume
	}
	return volume + " (" + claim + ")"
}

// write writes words on lines that begin with the indent and are no longer than width,
// unless one word is; 0: on one line.
func write(text *strings.Builder, indent, words string, width int) {
	line := indent
	for _, word := range strings.Fields(words) {
		if line != indent && width > 0 && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			text.WriteString(line + "\n")
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += word
	}
	text.WriteString(line + "\n")
}

// shortened takes out the middle of a text that has more than so many characters.
func shortened(text string, most int) string {
	all := []rune(text)
	if len(all) <= most {
		return text
	}
	tail := (most - 1) / 2
	return string(all[:most-1-tail]) + "…" + string(all[len(all)-tail:])
}

// age writes a time in one unit or two, such as 45s, 3m, 2h5m or 12d.
func age(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 10*time.Hour:
		return strings.TrimSuffix(fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute), "0m")
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// name is the pod that a target is for, or what the part is.
func (p PartStatus) name() string { return cmp.Or(p.Pod, p.Part) }

// asked is what is asked of a part, without how and where.
func (p PartStatus) asked() string {
	var short []string
	for words := range strings.SplitSeq(p.Asked, ", then ") {
		words, _, _ = strings.Cut(words, " at ")
		words, _, _ = strings.Cut(words, " as ")
		short = append(short, strings.TrimPrefix(words, "published "))
	}
	return strings.Join(short, ", then ")
}

func (p PartStatus) next(now time.Time) string {
	if p.NextTry == nil {
		return ""
	}
	if left := p.NextTry.Sub(now); left > time.Second {
		return "in " + age(left)
	}
	return "now"
}

// detail says what is wrong with a part, in one line, and how often it was lost.
func (p PartStatus) detail(now time.Time) string {
	words := strings.Fields(p.Error)
	if p.Losses > 0 {
		words = append(words, fmt.Sprintf("(lost %s, last %s ago)", timesInARow(p.Losses), age(now.Sub(p.Lost))))
	}
	return strings.Join(words, " ")
}

// detail describes the volume as a whole: its device, and the step that runs.
func (s Status) detail() string {
	text := "device " + s.Device
	if s.Holder != "" {
		text += "; held by " + s.Holder
	}
	if s.Step != nil {
		text += fmt.Sprintf("; step %s has been running for %s", s.Step.Step, s.Step.Age.Round(time.Millisecond))
		if s.Step.Progress != "" {
			text += " (" + s.Step.Progress + ")"
		}
	}
	return text
}

func timesInARow(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times in a row", n)
}
