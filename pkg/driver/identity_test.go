package driver

import (
	"errors"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestProbe(t *testing.T) {
	for _, missing := range []error{nil, errors.New("mkfs.xfs is needed")} {
		i := &identity{lacks: func() error { return missing }}
		resp, err := i.Probe(t.Context(), &csi.ProbeRequest{})
		switch {
		case missing == nil && (err != nil || !resp.GetReady().GetValue()):
			t.Errorf("%v, %v", resp, err)
		case missing != nil && (state.ClassOf(err) != state.FailedPrecondition || !strings.Contains(err.Error(), missing.Error())):
			t.Errorf("without a program: %v, %v", resp, err)
		}
	}
}
