package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/cobra"
)

// TestWatch: what is read is shown at first and whenever it is another, but for what always changes; what cannot be read is
// said once; and an interrupt ends it without an error.
func TestWatch(t *testing.T) {
	type value struct {
		state string
		age   int
	}
	silent := errors.New("silent")
	for output, want := range map[Output]string{
		"table": "a 0\n\n+6s\nb 3\n! +8s silent\n\n+12s\nb 6\n",
		"yaml":  "a 0\n---\nb 3\n! +8s silent\n---\nb 6\n",
		"json":  "a 0\nb 3\n! +8s silent\nb 6\n",
	} {
		synctest.Test(t, func(t *testing.T) {
			for _, after := range []time.Duration{6 * time.Second, 8 * time.Second, 12 * time.Second} {
				want = strings.ReplaceAll(want, "+"+after.String(), time.Now().Add(after).Format(time.TimeOnly))
			}
			states := []string{"a", "a", "a", "b", "", "", "b", "b"}
			ctx, interrupt := context.WithCancel(t.Context())
			said := &strings.Builder{}
			cmd := &cobra.Command{}
			cmd.SetContext(ctx)
			cmd.SetOut(said)
			cmd.SetErr(marked{said})
			reads := 0
			read := func(context.Context) (value, error) {
				at := reads
				reads++
				if reads == len(states) {
					interrupt()
				}
				if states[at] == "" {
					return value{}, silent
				}
				return value{states[at], at}, nil
			}
			steady := func(v value) value { return value{state: v.state} }
			show := func(v value) error { _, err := fmt.Fprintln(said, v.state, v.age); return err }
			if err := Watch(cmd, 2*time.Second, output, read, steady, show); err != nil {
				t.Error(err)
			}
			if got := said.String(); got != want || reads != len(states) {
				t.Errorf("with %d reads it says, as %s,\n%s\nand not\n%s", reads, output, got, want)
			}
		})
	}
}

// TestWatchThatCannotShow ends with the reason.
func TestWatchThatCannotShow(t *testing.T) {
	closed := errors.New("closed")
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	one := func(context.Context) (int, error) { return 1, nil }
	if err := Watch(cmd, time.Hour, "table", one, func(v int) int { return v }, func(int) error { return closed }); !errors.Is(err, closed) {
		t.Error(err)
	}
}

// marked marks what is said of errors.
type marked struct{ to *strings.Builder }

func (m marked) Write(text []byte) (int, error) {
	m.to.WriteString("! ")
	return m.to.Write(text)
}
