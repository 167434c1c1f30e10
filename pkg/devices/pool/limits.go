package pool

import (
	"errors"
	"math"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/csi-node/csi-node/pkg/state"
)

// amount is a part of the pool's file system: a number of bytes or a percentage of its
// size, whichever is larger. The zero value means none.
type amount struct {
	Bytes   int64
	Percent int64
}

// parseAmount reads a Kubernetes quantity such as 10Gi, a percentage such as 5%,
// or both with a comma between them. 0 and an empty text mean no amount.
func parseAmount(text string) (amount, error) {
	var a amount
	if text == "" {
		return a, nil
	}
	for _, part := range strings.Split(text, ",") {
		if number, percent := strings.CutSuffix(part, "%"); percent {
			n, err := strconv.ParseUint(number, 10, 8)
			if err != nil || n > 100 || a.Percent > 0 {
				return amount{}, errNoAmount
			}
			a.Percent = int64(n)
			continue
		}
		q, err := resource.ParseQuantity(part)
		if err != nil || q.Sign() < 0 || q.Cmp(*resource.NewQuantity(math.MaxInt64, resource.BinarySI)) > 0 || a.Bytes > 0 {
			return amount{}, errNoAmount
		}
		a.Bytes = q.Value()
	}
	return a, nil
}

var errNoAmount = errors.New("must be a quantity such as 10Gi, a percentage of the pool's file system such as 5%, or both, such as 1Gi,5%, of which the larger counts; 0 for none")

// Of returns the amount of a file system, in bytes.
func (a amount) Of(total int64) int64 {
	return max(a.Bytes, total/100*a.Percent)
}

// limits keep volumes from taking all of a pool. Volumes beyond them are kept. The zero
// value has none.
type limits struct {
	// Reserve of the pool's file system is given to no volume. Volumes that are
	// overcommitted may write into it.
	Reserve amount
	// InlineSize bounds each inline ephemeral volume, InlineTotal all of them
	// together; none: no bound but the pool's.
	InlineSize, InlineTotal amount
}

// kept returns the bytes of the pool's file system that are given to no volume.
func (p *Pool) kept(total int64) int64 { return max(p.limits.Reserve.Of(total), ownBytes) }

func (l limits) inline() bool { return l.InlineSize != (amount{}) || l.InlineTotal != (amount{}) }

// checkInline returns why an inline ephemeral volume of so many bytes may not be
// made while the others have that many together.
func (l limits) checkInline(bytes, others, total int64) error {
	if most := l.InlineSize.Of(total); l.InlineSize != (amount{}) && bytes > most {
		return state.Errorf(state.InvalidArgument, "an inline ephemeral volume of %s: this node allows %s each (--inline-max-size): ask for less in the pod's volumeAttributes, or use a PersistentVolumeClaim", state.FormatSize(bytes), state.FormatSize(most))
	}
	if most := l.InlineTotal.Of(total); l.InlineTotal != (amount{}) && bytes > most-others {
		return state.Errorf(state.ResourceExhausted, "an inline ephemeral volume of %s: this node allows %s to all of them together (--inline-max-total), and others have too much of it: wait until their pods end, ask for less, or use a PersistentVolumeClaim", state.FormatSize(bytes), state.FormatSize(most))
	}
	return nil
}
