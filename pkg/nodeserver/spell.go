package nodeserver

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// pathFields are the fields of requests that hold a path.
var pathFields = []protoreflect.Name{"staging_target_path", "target_path", "volume_path"}

// spell returns the request with its paths in the spelling that intents have (see
// Paths.Spell), because one file may have several paths. The request itself is not
// changed.
func spell[R proto.Message](ctx context.Context, paths Paths, req R) (R, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTime(ctx))
	defer cancel()
	spelled := req
	for _, name := range pathFields {
		field := req.ProtoReflect().Descriptor().Fields().ByName(name)
		if field == nil {
			continue
		}
		asked := req.ProtoReflect().Get(field).String()
		path, err := paths.Spell(ctx, asked)
		switch {
		case err != nil:
			return req, fmt.Errorf("%s: %w", name, err)
		case path == asked:
			continue
		case any(spelled) == any(req):
			spelled = proto.CloneOf(req)
		}
		spelled.ProtoReflect().Set(field, protoreflect.ValueOfString(path))
	}
	return spelled, nil
}
