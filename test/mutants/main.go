package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"time"
)

// parallel is how many mutants run at a time.
const parallel = 2

func main() {
	all := flag.Bool("all", false, "run all tests of a package and name all that fail, to find those that kill a mutant")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := kill(ctx, *all, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		stop()
		os.Exit(1)
	}
}

// kill makes the mutants whose names hold one of the words, all without words,
// and returns an error unless every one is killed.
func kill(ctx context.Context, all bool, words []string) error {
	if os.Geteuid() != 0 {
		return errors.New("some of the tests mount and attach devices: run this as root")
	}
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return fmt.Errorf("find the module: %w", err)
	}
	mutants, err := readLists()
	if err != nil {
		return err
	}
	mutants = slices.DeleteFunc(mutants, func(m *mutant) bool {
		return len(words) > 0 && !slices.ContainsFunc(words, func(word string) bool { return strings.Contains(m.name, word) })
	})
	scratch, err := os.MkdirTemp("", "mut")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	r := &runner{root: strings.TrimSpace(string(root)), scratch: scratch, all: all}
	start := time.Now()
	if err := r.sound(ctx, mutants); err != nil {
		return err
	}
	counts := r.killAll(ctx, mutants)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	fmt.Printf("%d mutants in %s: %d killed, %d of them by hanging\n", len(mutants), time.Since(start).Round(time.Second), counts[killed]+counts[hung], counts[hung])
	if counts[survived]+counts[broken] > 0 {
		return fmt.Errorf("%d mutants survived, %d are broken", counts[survived], counts[broken])
	}
	return nil
}

// killAll runs the mutants, parallel at a time, and counts how they end.
func (r *runner) killAll(ctx context.Context, mutants []*mutant) map[kind]int {
	var mu sync.Mutex
	var running sync.WaitGroup
	counts := map[kind]int{}
	next := make(chan *mutant)
	for range parallel {
		running.Go(func() {
			for m := range next {
				res := r.mutant(ctx, m)
				mu.Lock()
				counts[res.kind]++
				report(m, res)
				mu.Unlock()
			}
		})
	}
	for _, m := range mutants {
		if ctx.Err() == nil {
			next <- m
		}
	}
	close(next)
	running.Wait()
	return counts
}

func report(m *mutant, res result) {
	line := fmt.Sprintf("%s %5.1fs  %s: %s", res.kind, res.took.Seconds(), m.pkg, m.name)
	if res.by != "" {
		line += "  [by " + res.by + "]"
	}
	fmt.Println(line)
	switch res.kind {
	case survived:
		fmt.Printf("\tin %s, though %s:\n\t-%s\n\t+%s\n", m.file, m.why, strings.Join(m.old, "\n\t-"), strings.Join(m.new, "\n\t+"))
	case broken:
		fmt.Println("\t" + strings.ReplaceAll(strings.TrimSpace(res.output), "\n", "\n\t"))
	}
}
