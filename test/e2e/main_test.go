package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"testing"
)

var (
	hold   = flag.Bool("hold", false, "keep the cluster after the tests until interrupted")
	rounds = flag.Int("rounds", 1, "how often TestManyPods starts and ends its pods")
)

// the is the cluster of all tests.
var the *cluster

func TestMain(m *testing.M) {
	code, err := play(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
	}
	os.Exit(code)
}

func play(m *testing.M) (int, error) {
	switch os.Getenv(roleVariable) {
	case "":
		return supervise()
	case "init":
		return beInit()
	case "node":
		return 1, beNode()
	}
	flag.Parse()
	r, err := fromEnvironment()
	if err != nil {
		return 1, err
	}
	if the, err = start(context.Background(), r); err != nil {
		return 1, err
	}
	if err := deploy(context.Background(), the); err != nil {
		return 1, err
	}
	code := m.Run()
	if *hold {
		say("tests ended with code %d; the cluster is kept until an interrupt", code)
		interrupt := make(chan os.Signal, 1)
		signal.Notify(interrupt, os.Interrupt)
		<-interrupt
	}
	return code, nil
}
