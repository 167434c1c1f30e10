package command

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/spf13/cobra"
)

// Watch shows what is read whenever it differs from what was shown before, until the
// command is interrupted. steady returns what is compared: the value without what
// changes while nothing happens. What cannot be read is said once, and read again
// later.
func Watch[T any](cmd *cobra.Command, every time.Duration, output Output, read func(context.Context) (T, error), steady func(T) T, show func(T) error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last T
	lastErr := ""
	for first := true; ; first = false {
		now, err := read(cmd.Context())
		switch {
		case cmd.Context().Err() != nil:
			return nil
		case err != nil && err.Error() != lastErr:
			lastErr = err.Error()
			fmt.Fprintf(cmd.ErrOrStderr(), "%s %v\n", time.Now().Format(time.TimeOnly), err)
		case err == nil && (first || lastErr != "" || !reflect.DeepEqual(steady(now), last)):
			last, lastErr = steady(now), ""
			if !first && output != "json" {
				fmt.Fprintln(cmd.OutOrStdout(), between(output))
			}
			if err := show(now); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-cmd.Context().Done():
			return nil
		}
	}
}

// between is the line between two values.
func between(output Output) string {
	if output == "yaml" {
		return "---"
	}
	return "\n" + time.Now().Format(time.TimeOnly)
}
