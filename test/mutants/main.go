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
const parallel = 4

func main() {
	all := flag.Bool("all", false, "run all tests of a package and name all that fail, to find those that kill a mutant")
	skip := flag.String("skip", "", "with -all: the tests to leave out, as go test -skip has it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := kill(ctx, *all, *skip, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// kill makes the mutants whose file or name holds one of the words, all without
// words, and returns an error unless every one is killed.
func kill(ctx context.Context, all bool, skip string, words []string) error {
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
		return len(words) > 0 && !slices.ContainsFunc(words, func(word string) bool { return strings.Contains(m.file+" "+m.name, word) })
	})
	scratch, err := os.MkdirTemp("", "mut")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	r := &runner{root: strings.TrimSpace(string(root)), scratch: scratch, all: all, skip: skip}
	start := time.Now()
	builds, err := r.plan(mutants)
	if err != nil {
		return err
	}
	counts := map[kind]int{}
	for _, b := range builds {
		if err := r.killAll(ctx, b, counts); ctx.Err() != nil {
			return ctx.Err()
		} else if err != nil {
			counts[broken] += len(b.mutants)
			fmt.Println(err)
		}
	}
	fmt.Printf("%d mutants in %s: %d killed, %d of them by hanging\n", len(mutants), time.Since(start).Round(time.Second), counts[killed]+counts[hung], counts[hung])
	if counts[survived]+counts[broken] > 0 {
		return fmt.Errorf("%d mutants survived, %d are broken", counts[survived], counts[broken])
	}
	return nil
}

// killAll runs the mutants of a program, parallel at a time, and counts how they
// end. An error: the program cannot be made, or its tests fail without a mutant.
func (r *runner) killAll(ctx context.Context, b *build, counts map[kind]int) error {
	if err := r.make(ctx, b); err != nil {
		return err
	}
	defer os.Remove(b.program)
	if b.ids != nil {
		res := r.sound(ctx, b)
		if res.kind != survived {
			return fmt.Errorf("the tests of %s fail without any mutant:\n%s", b.pkg, res.output)
		}
		fmt.Printf("%s: its tests pass without a mutant (%.1fs)\n", b.pkg, res.took.Seconds())
	}
	var mu sync.Mutex
	var running sync.WaitGroup
	next := make(chan *mutant)
	for range parallel {
		running.Go(func() {
			for m := range next {
				res := r.run(ctx, b, m)
				mu.Lock()
				if ctx.Err() == nil {
					counts[res.kind]++
					report(m, res)
				}
				mu.Unlock()
			}
		})
	}
	for _, m := range b.mutants {
		if ctx.Err() == nil {
			next <- m
		}
	}
	close(next)
	running.Wait()
	return ctx.Err()
}

func report(m *mutant, res result) {
	line := fmt.Sprintf("%s in %.1fs: %s: %s", res.kind, res.took.Seconds(), m.pkg, m.name)
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
