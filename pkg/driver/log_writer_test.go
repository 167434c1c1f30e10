package driver

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// slowReader takes nothing until it is told to.
type slowReader struct {
	reads chan struct{}
	got   strings.Builder
}

func (r *slowReader) Write(p []byte) (int, error) {
	<-r.reads
	return r.got.Write(p)
}

// Nobody waits for who reads the log: what has no room is left out, which is told once it is read again.
func TestLogThatNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader, lost := &slowReader{reads: make(chan struct{})}, 0
		w := newLogWriter(reader, func(lines int) { lost += lines })
		line := strings.Repeat("x", 1023) + "\n"
		const lines = 3 * maxLogQueue / 1024
		for range lines {
			if n, err := fmt.Fprint(w, line); n != len(line) || err != nil {
				t.Fatal(n, err)
			}
		}
		began := time.Now()
		w.End()
		if waited := time.Since(began); waited != logDrain {
			t.Errorf("it ended after %s, want %s", waited, logDrain)
		}
		close(reader.reads)
		synctest.Wait()
		written := strings.Count(reader.got.String(), line)
		if written < maxLogQueue/1024 || written > 2*maxLogQueue/1024 || written+lost != lines {
			t.Errorf("of %d lines %d are written and %d told to be left out", lines, written, lost)
		}
	})
}

// What was logged is written when it ends, in order; an error of who reads it keeps nobody.
func TestLogIsWrittenAtTheEnd(t *testing.T) {
	var reader slowReader
	reader.reads = make(chan struct{})
	close(reader.reads)
	w := newLogWriter(&reader, func(int) { t.Error("lines were left out") })
	var want strings.Builder
	for i := range 1000 {
		fmt.Fprintln(w, i)
		fmt.Fprintln(&want, i)
	}
	w.End()
	w.End()
	if reader.got.String() != want.String() {
		t.Errorf("%d bytes are written, want %d", reader.got.Len(), want.Len())
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	w = newLogWriter(full, func(int) {})
	if _, err := fmt.Fprintln(w, "text"); err != nil {
		t.Error(err)
	}
	w.End()
}
